"""The blocks and the model around them, one document at a time, in numpy float64 loops.

Written from Titans eq 19-31 and Miras, with the readings that memory/README.md lists, on top of the token recurrence of
`oracle.py`; shares no code with the package. Rows are tokens.
"""

import numpy as np
import oracle

from titans_jax.config import step_size_bound  # a measured number, tests/memory/test_step_unit.py


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms_norm(x, scale, epsilon=1e-6):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * scale


def turn(x, positions, theta):
    """Rotary embedding of x [rows, heads, head_dim], pairs (i, i + head_dim / 2) as complex numbers."""
    half = x.shape[-1] // 2
    angles = np.array(positions)[:, None] * theta ** (-np.arange(half) / half)
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def binary_expansion(segments):
    """The pieces (begin, end) that Memory Caching's logarithmic segments cut so many segments into: 13 to 8 + 4 + 1."""
    pieces, begin = [], 0
    while begin < segments:
        length = 1
        while 2 * length <= segments - begin:
            length *= 2
        pieces.append((begin, begin + length))
        begin += length
    return pieces


class Model:
    """config: a ModelConfig. params: the model's parameters by path, stacked over layers as the package stacks them."""

    def __init__(self, config, params):
        self.config, self.params = config, params

    def logits(self, tokens):
        """[time] -> [time, vocab]."""
        config, params = self.config, self.params
        x = config.embedding_scale * params["embedding", "embedding"][tokens]
        for layer in range(config.depth):
            cycle, number = divmod(layer, len(config.pattern))
            prefix = ("cycles", "blocks", number)
            block = {path[3:]: value[cycle] for path, value in params.items() if path[:3] == prefix}
            x = x + getattr(self, config.pattern[number])(block, x)
            if config.pattern[number] != "mamba":
                x = x + self.feed_forward(block, x)
        head = params.get(("head", "kernel"), params["embedding", "embedding"].T)
        return rms_norm(x, params["norm", "scale"]) @ head

    def feed_forward(self, p, x):
        x = rms_norm(x, p["feed_forward_norm", "scale"])
        up = silu(x @ p["feed_forward", "gate", "kernel"]) * (x @ p["feed_forward", "up", "kernel"])
        return up @ p["feed_forward", "down", "kernel"]

    def persistent(self, p):
        return p.get(("persistent", "tokens"), np.zeros((0, self.config.dim)))

    def lmm(self, p, x):
        return self.memory(p, rms_norm(x, p["memory_norm", "scale"]))

    def mag(self, p, x):
        x = rms_norm(x, p["norm", "scale"])
        content = self.causal_attention(p, x, self.config.window, self.persistent(p))
        return self.merge(p, content, self.memory(p, x))

    def mal(self, p, x):
        y = self.memory(p, rms_norm(x, p["memory_norm", "scale"]))
        normed = rms_norm(x + y, p["attention_norm", "scale"])
        return y + self.causal_attention(p, normed, self.config.window, self.persistent(p))

    def attention(self, p, x):
        return self.causal_attention(p, rms_norm(x, p["attention_norm", "scale"]), None, np.zeros((0, self.config.dim)))

    def window(self, p, x):
        normed = rms_norm(x, p["attention_norm", "scale"])
        return self.causal_attention(p, normed, self.config.window, np.zeros((0, self.config.dim)))

    def retrofit(self, p, x):
        said = self.memory(p, rms_norm(x, p["attention_norm", "scale"]))
        return (1 - p["share",]) * self.window(p, x) + p["share",] * said

    def mamba(self, p, x):
        """Mamba's recurrence, channel by channel (arXiv 2312.00752, algorithm 2)."""
        x = rms_norm(x, p["mamba_norm", "scale"])
        taps, rates = p["mamba", "convolution", "kernel"], -np.exp(p["mamba", "log_rate"])
        inputs = np.concatenate([np.zeros((len(taps) - 1, taps.shape[1])), x @ p["mamba", "input", "kernel"]])
        u = sum(taps[lag] * inputs[len(taps) - 1 - lag :][: len(x)] for lag in range(len(taps)))
        u = silu(u + p["mamba", "convolution", "bias"])
        rank, entries = len(p["mamba", "step", "kernel"]), len(rates)
        low, write, read = np.split(u @ p["mamba", "selection", "kernel"], [rank, rank + entries], axis=1)
        bias, skip = (p["mamba", name] for name in ("step_bias", "skip"))
        step = np.log1p(np.exp(low @ p["mamba", "step", "kernel"] + bias))
        y = np.zeros_like(u)
        for channel in range(u.shape[1]):
            h = np.zeros(entries)
            for t in range(len(x)):
                h = np.exp(step[t, channel] * rates[:, channel]) * h + step[t, channel] * write[t] * u[t, channel]
                y[t, channel] = read[t] @ h + skip[channel] * u[t, channel]
        return (y * silu(x @ p["mamba", "output_gate", "kernel"])) @ p["mamba", "output", "kernel"]

    samba = mamba

    def mac(self, p, x):
        """Token by token over segments; everything before a token's own row is already final."""
        segment, prefix = self.config.segment, self.persistent(p)
        x = rms_norm(x, p["norm", "scale"])
        queries = self.features(p, "query", x, None)
        asks, keys, values = (self.projected(p, name, x) for name in ("query", "key", "value"))
        states, zs, raw, out = self.start(p), np.zeros((0, self.config.dim)), [], []
        for t in range(len(x)):
            first = t - t % segment
            if t == first:
                opened, context = states, []
            if self.config.mac_long_term is None:
                h = rms_norm(self.retrieve(p, opened, queries[t : t + 1]), p["recall_norm", "scale"])
                context.append(h.reshape(-1))
                plain = [np.array(context) @ p["attention", name, "kernel"] for name in ("key", "value")]
                rows = [
                    np.concatenate(x) for x in zip(plain, (keys[first : t + 1], values[first : t + 1]), strict=True)
                ]
                positions, seen = list(range(t - first + 1)) * 2, prefix
            else:
                asked = p["long_term", "queries"]
                asked = asked / np.sqrt(np.sum(asked**2, axis=-1, keepdims=True) + 1e-6)
                h = rms_norm(self.retrieve(p, opened, asked), p["recall_norm", "scale"])
                seen = np.concatenate([prefix, h.reshape(len(h), -1)])
                rows, positions = (keys[first : t + 1], values[first : t + 1]), list(range(t - first + 1))
            y = self.attend(p, asks[t : t + 1], [t - first], rows, positions, seen)
            z = y
            if self.config.mac_write == "residual":
                z = rms_norm(x[t] + y, p["write_norm", "scale"])
            zs = np.concatenate([zs, z])
            reads, states = self.write(p, zs, slice(t, t + 1), states)
            raw.append(reads[0])
            reads = reads + self.skip(p, zs, slice(t, t + 1))
            out.append(self.merge(p, y, self.leave(p, z, reads, self.predictions(p, zs, np.array(raw))[-1:]))[0])
        return np.array(out)

    def merge(self, p, content, gate):
        if self.config.merge == "residual":
            share = sigmoid(p["merge", "gate_scale"] * gate)
            return gate + 2 * p["merge", "content_scale"] * content * share
        content = rms_norm(content, p["merge", "content_norm", "scale"])
        gate = rms_norm(gate, p["merge", "gate_norm", "scale"])
        return (content * sigmoid(gate)) @ p["merge", "output", "kernel"]

    # Attention

    def split(self, x):
        return x.reshape(len(x), self.config.num_heads, self.config.head_dim)

    def projected(self, p, name, x):
        """Queries, keys or values of all rows, behind their convolution where there is one; nothing stands before x."""
        y = x @ p["attention", name, "kernel"]
        taps = p.get(("attention", f"{name}_convolution", "kernel"), np.ones((1, 1)))
        rows = np.concatenate([np.zeros((len(taps) - 1, y.shape[1])), y])
        return sum(taps[lag] * rows[len(taps) - 1 - lag :][: len(x)] for lag in range(len(taps)))

    def attend(self, p, queries, positions, rows, row_positions, prefix):
        """Projected queries see all rows, keys and values, and those of the prefix, which are not convolved."""
        theta, (keys, values) = self.config.rope_theta, rows
        queries, keys = turn(self.split(queries), positions, theta), turn(self.split(keys), row_positions, theta)
        keys = np.concatenate([self.split(prefix @ p["attention", "key", "kernel"]), keys])
        values = self.split(np.concatenate([prefix @ p["attention", "value", "kernel"], values]))
        scores = np.einsum("thd,shd->hts", queries, keys) / np.sqrt(self.config.head_dim)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        y = np.einsum("hts,shd->thd", weights, values).reshape(len(queries), -1)
        return y @ p["attention", "output", "kernel"]

    def causal_attention(self, p, x, window, prefix):
        (asks, keys, values), rows = (self.projected(p, name, x) for name in ("query", "key", "value")), []
        for t in range(len(x)):
            first = 0 if window is None else max(0, t - window + 1)
            seen = list(range(first, t + 1))
            rows.append(self.attend(p, asks[t : t + 1], [t], (keys[seen], values[seen]), seen, prefix)[0])
        return np.array(rows)

    # Memory

    def rule(self):
        memory = self.config.memory
        architecture = {"linear": "mlp", None: "residual_mlp"}.get(memory.architecture, memory.architecture)
        to_start = memory.forget_to == "start" and memory.start != "zero" and architecture != "linear"
        bound_slope = memory.bound_slope and architecture == "residual_mlp"
        momentum, scaled = memory.momentum is not False, memory.scale_keys is not False
        return oracle.Rule(architecture, "l2", momentum, memory.chunk_size, to_start, bound_slope, scale_keys=scaled)

    def slow(self, p, head):
        weights = [value for _, value in sorted((k, v) for k, v in p.items() if k[:2] == ("memory", "start_weights"))]
        params = {"weights": [weight[head] for weight in weights]}
        if self.config.memory.start == "zero":
            params["weights"] = [np.zeros((self.config.head_dim, self.config.head_dim))]
        if ("memory", "slow", "norm_scale") in p:
            params["norm_scale"] = p["memory", "slow", "norm_scale"][head]
        return params

    def start(self, p):
        return [oracle.start(self.slow(p, head)) for head in range(self.config.num_heads)]

    def features(self, p, name, x, before):
        """Queries, keys or values of x [rows, heads, head_dim]; `before`: rows of input in front of x, or None. Keys
        without a projection are the queries of one row before."""
        if name == "key" and ("memory", "key", "projection", "kernel") not in p:
            queries = self.features(p, "query", x if before is None else np.concatenate([before, x]), None)
            return np.concatenate([np.zeros_like(queries[:1]), queries[:-1]])[-len(x) :]
        kernel, taps = p["memory", name, "projection", "kernel"], p["memory", name, "convolution", "kernel"]
        history = np.zeros((0, self.config.dim)) if before is None else before
        rows = np.concatenate([np.zeros((len(taps) - 1, kernel.shape[1])), np.concatenate([history, x]) @ kernel])
        count = len(history) + len(x)
        y = sum(taps[lag] * rows[len(taps) - 1 - lag :][:count] for lag in range(len(taps)))[len(history) :]
        y = self.split(silu(y) if self.config.memory.activation else y)
        unit = y / np.sqrt(np.sum(y**2, axis=-1, keepdims=True) + 1e-6)
        if name in ("value", "skip_value"):
            return unit * np.sqrt(self.config.head_dim) if self.sized() else y
        return unit

    def sized(self):
        """Whether values are as large as what a memory behind a norm says."""
        said, behind = self.config.memory.normalize_values, self.config.memory.architecture in (None, "residual_mlp")
        return behind if said is None else said

    def skip(self, p, rows, part):
        """What the values of rows[part], or those of a projection for this alone, add to reads, [rows, heads,
        head_dim]."""
        if ("memory", "skip") not in p:
            return 0.0
        name = "skip_value" if ("memory", "skip_value", "projection", "kernel") in p else "value"
        return p["memory", "skip"][:, None] * self.features(p, name, rows, None)[part]

    def write(self, p, rows, part, states):
        """Write rows[part] of a sequence: reads [rows, heads, head_dim] and the heads' next states."""
        config = self.config
        q, keys, v = (self.features(p, name, rows, None) for name in ("query", "key", "value"))
        # Per head: forget, step size and momentum, one of each for every fast matrix or for all of them.
        kernel, bias = (p["memory", "gates", name] for name in ("kernel", "bias"))
        count = len(self.slow(p, 0)["weights"])
        gates = np.einsum("td,dhk->thk", rows / np.sqrt(config.dim), kernel) + bias[None]
        sets = 1 if config.memory.shared_gates else count
        gates = np.moveaxis(sigmoid(gates.reshape(*gates.shape[:2], -1, sets)), 2, 0).repeat(count // sets, axis=-1)
        forget, step_size = gates[0], gates[1] * step_size_bound(config)
        momentum = gates[2] if len(gates) == 3 else np.zeros_like(forget)
        if config.memory.share_steps and config.memory.step_unit == "error":
            shares = config.memory.max_step_size * gates[1].mean(axis=-1)
            if len(gates) == 3:  # the momentum of all matrices, as a geometric mean
                shares = shares / (1 - np.exp(np.log(momentum).mean(axis=-1)))
            step_size = step_size * self.shared(keys, shares, part, states[0].position)[..., None]
        q, k, v, forget, momentum, step_size = (x[part] for x in (q, keys, v, forget, momentum, step_size))
        reads, after = np.zeros_like(q), []
        for head, state in enumerate(states):
            reads[:, head], state, _, _ = oracle.memorize(
                self.rule(),
                self.slow(p, head),
                state,
                q[:, head],
                k[:, head],
                v[:, head],
                forget[:, head],
                momentum[:, head],
                step_size[:, head],
            )
            after.append(state)
        return reads, after

    def shared(self, keys, shares, part, position):
        """What earlier tokens of its chunk leave of the step of every row of `part`; 1 for other rows."""
        left, first = np.ones_like(shares), part.start
        for t, head in np.ndindex(*shares[part].shape):
            now = first + t
            for earlier in range(now - (position + t) % self.config.memory.chunk_size, now):
                cosine = max(0.0, keys[now, head] @ keys[earlier, head])
                left[now, head] *= 1 - min(min(shares[earlier, head], 1) * cosine**4, 0.98)
        return left

    def retrieve(self, p, states, queries):
        """Read without writing, [rows, heads, head_dim]."""
        reads = np.zeros_like(queries)
        for t, head in np.ndindex(queries.shape[:2]):
            norm_scale = self.slow(p, head).get("norm_scale")
            reads[t, head] = oracle.read(self.rule(), states[head].weights, norm_scale, queries[t, head])
        return reads

    def predictions(self, p, rows, reads):
        """What the gate of every row sees of the last reads' predictions, from reads of all rows of a sequence."""
        if ("memory", "prediction", "kernel") not in p:
            return np.zeros((len(rows), 1))
        kernel, values = p["memory", "prediction", "kernel"], self.features(p, "value", rows, None)
        logits = np.zeros_like(values)
        for t, head in np.ndindex(*values.shape[:2]):
            for lag in range(min(len(kernel), t)):  # the read before the first row is none
                read, value = reads[t - lag - 1, head], values[t - lag, head]
                cosine = read @ value / np.sqrt((read @ read + 1e-6) * (value @ value + 1e-6))
                logits[t, head] += cosine * kernel[lag, head]
        return logits.reshape(len(rows), -1)

    def leave(self, p, x, reads, predictions=0.0):
        """Reads to model width: norm per head, gate by x and by predictions, output projection."""
        y = rms_norm(reads, p["memory", "norm", "scale"]).reshape(len(x), -1)
        gate = silu(x @ p["memory", "output_gate", "kernel"] + predictions)
        return (y * gate) @ p["memory", "output_projection", "kernel"]

    def memory(self, p, x):
        """The memory over [P | x], with a new chunk where x begins; rows of x only."""
        prefix = self.persistent(p)
        rows = np.concatenate([prefix, x])
        states, before = self.start(p), np.zeros((0, self.config.num_heads, self.config.head_dim))
        if len(prefix):
            before, states = self.write(p, rows, slice(0, len(prefix)), states)
            states = [oracle.State(state.weights, state.momentum, state.weights, 0) for state in states]
        part = slice(len(prefix), None)
        if self.config.memory.caching is not None:
            reads = self.cached_reads(p, x, rows, states)
        else:
            reads, _ = self.write(p, rows, part, states)
        predictions = self.predictions(p, rows, np.concatenate([before, reads]))[part]
        return self.leave(p, x, reads + self.skip(p, rows, part), predictions)

    def cached_reads(self, p, x, rows, first):
        """Memory Caching, token by token: reads of x, which comes last in `rows`, from the states `first` on."""
        memory, before = self.config.memory, len(rows) - len(x)
        queries = self.features(p, "query", rows, None)[before:]
        name, _, said = memory.caching.partition("(k=")
        states, ends, reads = first, [], []
        for t in range(len(x)):
            opened = t - t % memory.cache_segment
            if t == opened and t:
                ends.append(states)
                states = first if memory.cache_restart else states
            pieces = [(begin, begin + 1) for begin in range(len(ends))]
            if memory.cache_segmentation == "logarithmic":
                pieces = binary_expansion(len(ends))
            kept = [ends[end - 1] for _, end in pieces]
            read, states = self.write(p, rows, slice(before + t, before + t + 1), states)
            shares = np.ones(len(kept) + 1)
            if name == "average":
                shares /= len(shares)
            elif name != "residual":
                bounds = [(memory.cache_segment * begin, memory.cache_segment * end) for begin, end in pieces]
                means = [x[slice(*bound)].mean(axis=0) for bound in [*bounds, (opened, t + 1)]]
                kernel = p["memory", "score", "kernel"]
                scores = np.array([x[t] @ kernel @ mean for mean in means]) / np.sqrt(self.config.dim)
                if name == "sparse":  # those that the chunk's first token likes best
                    asking = x[t - t % memory.chunk_size] @ kernel
                    liked = sorted(range(len(kept)), key=lambda i: -(asking @ means[i]))  # noqa: B023
                    scores[liked[int(said[:-1]) :]] = -np.inf
                if kept and memory.cache_counted:
                    scores[:-1] -= np.log(np.isfinite(scores[:-1]).sum())
                shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            answer = shares[-1] * read[0]
            if kept and name in ("soup", "average"):
                past = shares[:-1] / shares[:-1].sum()
                mixed = [
                    oracle.State(
                        [sum(a * w for a, w in zip(past, layer, strict=True)) for layer in zip(*weights, strict=True)],
                        None,
                        None,
                    )
                    for weights in ([states[head].weights for states in kept] for head in range(len(states)))
                ]
                answer = answer + shares[:-1].sum() * self.retrieve(p, mixed, queries[t : t + 1])[0]
            else:
                for share, old in zip(shares, kept, strict=False):
                    answer = answer + share * self.retrieve(p, old, queries[t : t + 1])[0]
            reads.append(answer)
        return np.array(reads)
