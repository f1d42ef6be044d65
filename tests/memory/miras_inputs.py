"""Every preset with random inputs for it, its oracle's answer, and the package's, in float64 unless asked otherwise.

Inputs are a dict of arrays with a leading time axis: queries, keys, values and gates under the names of `memory.Gates`,
in plain values (no logarithms), a missing retention being 1 and a missing step size 1.
"""

import dataclasses
import functools
from collections.abc import Callable

import hope_oracle
import jax
import jax.numpy as jnp
import later_oracle
import miras_oracle as oracle
import muon_oracle
import numpy as np
import omega_oracle
from oracle import Rule as OracleRule

from titans_jax import memory
from titans_jax.memory import presets

HEAD_DIM = 6
TIME = 14  # of chunks of four: three and a remainder
FORMS = ("recurrent", "associative", "chunked")  # that run every rule; test_fused has the fourth
RETENTIONS = ("retention", "momentum", "key_retention", "value_retention")
GATES = (*RETENTIONS, "step_size", "key_step_size", "value_step_size", "bias_gate", "erase", "window_weight")


@dataclasses.dataclass(frozen=True)
class Model:
    """draw(generator, time) -> inputs; expect(inputs, params) -> reads [time, d]."""

    rule: memory.MemoryRule
    draw: Callable
    expect: Callable

    @functools.cached_property
    def params(self):
        return random_params(self.rule)

    def inputs(self, time=TIME, seed=1):
        return self.draw(np.random.default_rng(seed), time)


def random_params(rule, seed=0):
    """Start matrices that any retention can carry, and slow parameters away from their start values, float64."""
    generator = np.random.default_rng(seed)
    shapes = rule.shapes(HEAD_DIM)
    slow = jax.tree.map(np.float64, rule.algorithm.slow(rule.architecture, HEAD_DIM) | rule.retention.slow(shapes))
    slow = {name: leaf * generator.uniform(0.7, 1.3, leaf.shape) for name, leaf in slow.items()}
    if "log_ridge" in slow:
        slow["log_ridge"] = generator.uniform(-0.5, 0.5, HEAD_DIM)
    if not rule.learned_start:
        return {"weights": tuple(np.zeros(shape) for shape in shapes), **slow}
    weights = [generator.normal(size=shape) / np.sqrt(shape[0]) for shape in shapes]
    with jax.enable_x64(True):
        return {"weights": tuple(np.asarray(rule.retention.start(jnp.asarray(w))) for w in weights), **slow}


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def tokens(generator, time, steps=None):
    """Keys of lengths around 1, so that what a model does with the length shows."""
    written = (time, HEAD_DIM) if steps is None else (time, steps, HEAD_DIM)
    return {
        "queries": unit(generator.normal(size=(time, HEAD_DIM))),
        "keys": unit(generator.normal(size=written)) * generator.uniform(0.6, 1.2, (*written[:-1], 1)),
        "values": generator.normal(size=written),
    }


def channels(generator, time):
    return generator.uniform(0.3, 1.0, (time, HEAD_DIM))


def draw_linear_attention(generator, time):
    return tokens(generator, time)


def draw_constant(generator, time):
    return tokens(generator, time) | {"retention": np.full(time, 1 - 2.0**-5)}


def draw_mamba2(generator, time):
    step = generator.uniform(0.1, 0.9, time)
    return tokens(generator, time) | {"step_size": step, "retention": np.exp(-0.7 * step)}


def draw_gla(generator, time):
    return tokens(generator, time) | {"key_retention": channels(generator, time)}


def draw_hgrn2(generator, time):
    inputs = draw_gla(generator, time)
    return inputs | {"keys": 1 - inputs["key_retention"]}


def draw_dfw(generator, time):
    return draw_gla(generator, time) | {"value_retention": channels(generator, time)}


def draw_deltanet(generator, time):
    return tokens(generator, time) | {"step_size": generator.uniform(0.1, 0.9, time)}


def draw_gated(generator, time):
    return draw_deltanet(generator, time) | {"retention": generator.uniform(0.5, 1.0, time)}


def draw_kimi(generator, time):
    return draw_deltanet(generator, time) | {"key_retention": channels(generator, time)}


def draw_gated_deltanet_2(generator, time):
    return draw_gla(generator, time) | {"erase": generator.uniform(0.1, 0.9, (time, HEAD_DIM))}


def draw_comba(generator, time):
    return draw_gated(generator, time) | {"erase": np.full((time, HEAD_DIM), 0.7)}


def draw_preconditioned(draw, generator, time):
    return draw(generator, time) | {"key_step_size": generator.uniform(0.7, 1.4, (time, HEAD_DIM))}


def draw_mamba3(generator, time):
    """The first inner step is the token before, with its own weight."""
    inputs, step, share = tokens(generator, time), *generator.uniform(0.1, 0.9, (2, time))
    retention = generator.uniform(0.5, 1.0, time)
    for name in ("keys", "values"):
        before = np.concatenate([np.zeros((1, HEAD_DIM)), inputs[name][:-1]])
        inputs[name] = np.stack([before, inputs[name]], axis=1)
    weights = np.stack([(1 - share) * step * retention, share * step], axis=1)
    return inputs | {"retention": retention, "step_size": weights}


def expect_mamba3(x, params):
    """From what `draw_mamba3` made; a document's first token has what it was drawn with before it."""
    own, before = (x["keys"][:, 1], x["values"][:, 1]), (x["keys"][0, 0], x["values"][0, 0])
    steps = x["step_size"][:, 0] / x["retention"] + x["step_size"][:, 1]
    return later_oracle.mamba3(x["queries"], *own, x["retention"], steps, x["step_size"][:, 1] / steps, before)


def draw_mamba3_mimo(generator, time):
    """Two keys a token: writes of the token before, then its own, each with a query."""
    inputs, step, share = tokens(generator, time, 2), *generator.uniform(0.1, 0.9, (2, time))
    retention = generator.uniform(0.5, 1.0, time)
    for name in ("keys", "values"):
        before = np.concatenate([np.zeros((1, 2, HEAD_DIM)), inputs[name][:-1]])
        inputs[name] = np.concatenate([before, inputs[name]], axis=1)
    weights = np.repeat(np.stack([(1 - share) * step * retention, share * step], axis=1), 2, axis=1)
    queries = unit(generator.normal(size=(time, 4, HEAD_DIM)))
    return inputs | {"queries": queries, "retention": retention, "step_size": weights}


def draw_delta_product(generator, time):
    gates = {"retention": generator.uniform(0.5, 1.0, time), "step_size": generator.uniform(0.1, 0.9, (time, 2))}
    return tokens(generator, time, 2) | gates


def draw_rwkv7(generator, time):
    inputs = tokens(generator, time, 2)
    inputs["values"][:, 0] = 0
    rate = np.stack([generator.uniform(0.1, 0.9, (time, HEAD_DIM)), np.ones((time, HEAD_DIM))], axis=1)
    gates = {"key_step_size": rate, "bias_gate": np.tile([1.0, 0.0], (time, 1)), "step_size": np.ones((time, 2))}
    return inputs | gates | {"key_retention": channels(generator, time)}


def draw_deep(generator, time, matrices=2, step=0.02):
    """Small steps: behind a norm a step of 0.1 overshoots (memory/README.md, Gates)."""
    gates = (time, matrices)
    return tokens(generator, time) | {
        "retention": generator.uniform(0.6, 1.0, gates),
        "step_size": generator.uniform(0.2, 1.0, gates) * step,
    }


def draw_ttt(generator, time):
    return tokens(generator, time) | {"step_size": generator.uniform(0.2, 1.0, time) * 0.02}


def draw_titans(generator, time):
    return draw_deep(generator, time) | {"momentum": generator.uniform(0.1, 0.9, (time, 2))}


def draw_omega(generator, time, window=3, momentum=False):
    """Weights of a window of 3 sum to 2 in the mean, and a token's steps to those of the others."""
    inputs = draw_titans(generator, time) if momentum else draw_deep(generator, time)
    weights = generator.uniform(0.0, 1.0, (time, window - 1))
    return inputs | {"step_size": inputs["step_size"] / 2, "window_weight": weights}


def draw_channels(generator, time):
    """draw_deep with every channel-wise gate (memory/README.md, Gates)."""
    retentions = {"key_retention": channels(generator, time), "value_retention": channels(generator, time)}
    steps = {"key_step_size": channels(generator, time), "value_step_size": channels(generator, time)}
    return draw_deep(generator, time) | retentions | steps


def draw_yaad(generator, time):
    return draw_channels(generator, time) | {"bias_gate": generator.uniform(0.3, 1.5, (time, HEAD_DIM))}


def draw_memora(generator, time):
    inputs = draw_channels(generator, time)
    return inputs | {"step_size": inputs["step_size"] * 10}  # the softmax divides what a step moves by its slice


def gates(inputs):
    return {name: inputs[name] for name in GATES if name in inputs and name != "bias_gate"}


def matrix_model(name, draw, *names):
    """A matrix memory whose oracle takes these arrays after queries, keys, values."""

    def expect(x, params):
        published = getattr(oracle, name, None) or getattr(later_oracle, name)
        return published(*(x[key] for key in ("queries", "keys", "values", *names)))

    return Model(presets.PRESETS["lightning_attention" if name == "lightning" else name].make(), draw, expect)


def deep_model(name, draw, chunk_size=4, *extra, **options):
    rule = presets.PRESETS[name].make(chunk_size=chunk_size, **options)

    def expect(x, params):
        before = [params[key] if isinstance(key, str) else key for key in extra]
        if name == "yaad":
            before = [x["bias_gate"]]
        start = (x["queries"], x["keys"], x["values"], params["weights"], params["norm_scale"], *before)
        if name.startswith("ttt"):
            return getattr(oracle, name)(*start, x["step_size"], chunk_size)
        return getattr(oracle, name)(*start, chunk_size, **gates(x))

    return Model(rule, draw, expect)


def omega_model(rule, window=3, momentum=False):
    """A rule with a window of tokens."""

    def expect(x, params):
        slow = (params["weights"], params.get("norm_scale"), params.get("degree_scale"))
        tokens = (x["queries"], x["keys"], x["values"])
        return omega_oracle.omega(*tokens, *slow, window=window, chunk_size=rule.chunk_size, **gates(x))

    return Model(rule, functools.partial(draw_omega, window=window, momentum=momentum), expect)


def hope_model(rule):
    """Delta gradient descent of an MLP memory, with fixed keys and values."""
    momentum, kind = rule.algorithm.has_momentum, "skip_mlp" if not rule.architecture.normalized else "residual_mlp"

    def expect(x, params):
        start = (params["weights"], params.get("norm_scale"), rule.chunk_size)
        return hope_oracle.hope(x["queries"], x["keys"], x["values"], *start, kind=kind, **gates(x))

    return Model(rule, draw_titans if momentum else draw_deep, expect)


def draw_lact(generator, time):
    """Three matrices; a step is the share of a matrix of singular values near 1."""
    return draw_deep(generator, time, 3, 1.0) | {"momentum": generator.uniform(0.1, 0.9, (time, 3))}


def draw_atlas(generator, time, window=3):
    """Steps that a matrix of singular values near 1 is multiplied by."""
    inputs = draw_titans(generator, time) if window == 1 else draw_omega(generator, time, window, momentum=True)
    return inputs | {"step_size": inputs["step_size"] * 20}


def muon_model(rule, draw):
    """A rule that takes one orthogonal step a chunk, its architecture, bias and options as in the oracle's words."""
    algorithm, words = rule.algorithm, {memory.architectures.ResidualMlp: "residual_mlp"}
    bias = "dot_product" if rule.bias == memory.biases.dot_product() else "l2"
    architecture = words.get(type(rule.architecture), "gated_mlp")
    said = OracleRule(architecture, bias, True, rule.chunk_size, rule.forget_to_start, rule.bound_slope)
    options = {
        "window": algorithm.window,
        "coefficients": {"muon": muon_oracle.MUON, "lact": muon_oracle.LACT}[algorithm.coefficients],
        "once_a_chunk": algorithm.momentum_by_chunk,
        "weight_norm": rule.retention == memory.retentions.weight_norm(),
    }

    def expect(x, params):
        tokens = (x["queries"], x["keys"], x["values"])
        return muon_oracle.memorize(said, params, *tokens, **gates(x), **options)[0]

    return Model(rule, draw, expect)


def dla_model(window=None):
    """A deep memory with the bias of linear attention, one token at a time or by a window."""
    rule = presets.PRESETS["dla"].make(window, expansion=2, chunk_size=4)

    def expect(x, params):
        tokens = (x["queries"], x["keys"], x["values"])
        slow, sizes = (params["weights"], params["norm_scale"]), {"window": window or 1, "chunk_size": 4}
        return omega_oracle.omega(*tokens, *slow, **sizes, bias="dot_product", **gates(x))

    return Model(rule, draw_deep if window is None else functools.partial(draw_omega, window=window), expect)


def constant_model(name):
    """RetNet and Lightning attention, whose retention is one number."""
    preset = "lightning_attention" if name == "lightning" else name
    return Model(
        presets.PRESETS[preset].make(),
        draw_constant,
        lambda x, params: getattr(oracle, name)(x["queries"], x["keys"], x["values"], x["retention"][0]),
    )


MODELS = {
    "linear_attention": matrix_model("linear_attention", draw_linear_attention),
    "retnet": constant_model("retnet"),
    "lightning_attention": constant_model("lightning"),
    "mamba2": Model(
        presets.mamba2(),
        draw_mamba2,
        lambda x, params: oracle.mamba2(x["queries"], x["keys"], x["values"], x["step_size"], 0.7),
    ),
    "gla": matrix_model("gla", draw_gla, "key_retention"),
    "hgrn2": Model(
        presets.hgrn2(), draw_hgrn2, lambda x, params: oracle.hgrn2(x["queries"], x["values"], x["key_retention"])
    ),
    "dfw": matrix_model("dfw", draw_dfw, "key_retention", "value_retention"),
    "deltanet": matrix_model("deltanet", draw_deltanet, "step_size"),
    "longhorn": matrix_model("longhorn", draw_deltanet, "step_size"),
    "gated_deltanet": matrix_model("gated_deltanet", draw_gated, "retention", "step_size"),
    "kimi_delta_attention": matrix_model("kimi_delta_attention", draw_kimi, "key_retention", "step_size"),
    "gated_deltanet_2": matrix_model("gated_deltanet_2", draw_gated_deltanet_2, "key_retention", "erase"),
    "comba": matrix_model("comba", draw_comba, "retention", "step_size", "erase"),
    "preconditioned_delta": matrix_model(
        "preconditioned_delta",
        functools.partial(draw_preconditioned, draw_gated),
        "retention",
        "step_size",
        "key_step_size",
    ),
    "preconditioned_kimi": matrix_model(
        "preconditioned_kimi",
        functools.partial(draw_preconditioned, draw_kimi),
        "key_retention",
        "step_size",
        "key_step_size",
    ),
    "mamba3": Model(presets.PRESETS["mamba3"].make(), draw_mamba3, expect_mamba3),
    "mamba3_mimo": Model(
        presets.PRESETS["mamba3_mimo"].make(2),
        draw_mamba3_mimo,
        lambda x, params: later_oracle.mamba3_mimo(
            *(x[name] for name in ("queries", "keys", "values", "retention", "step_size"))
        ),
    ),
    "rwkv7": Model(
        presets.rwkv7(),
        draw_rwkv7,
        lambda x, params: oracle.rwkv7(
            x["queries"],
            *np.moveaxis(x["keys"], 1, 0),
            x["values"][:, 1],
            x["key_retention"],
            x["key_step_size"][:, 0],
        ),
    ),
    "delta_product": matrix_model("delta_product", draw_delta_product, "retention", "step_size"),
    "mesa": Model(
        dataclasses.replace(presets.mesa(), chunk_size=4),
        draw_gated,
        lambda x, params: oracle.mesa(
            x["queries"], x["keys"], x["values"], x["retention"], x["step_size"], np.exp(params["log_ridge"])
        ),
    ),
    "ttt_linear": deep_model("ttt_linear", draw_ttt),
    "ttt_mlp": deep_model("ttt_mlp", draw_ttt, expansion=2),
    "titans": deep_model("titans", draw_titans, expansion=2),
    "omeganet": omega_model(presets.omeganet(3, expansion=2, chunk_size=4, degree=2)),
    "hope": hope_model(presets.PRESETS["hope"].make(expansion=2, chunk_size=4)),
    "atlas": muon_model(presets.PRESETS["atlas"].make(3, expansion=2, chunk_size=4), draw_atlas),
    "dla": dla_model(),
    "lact": muon_model(presets.PRESETS["lact"].make(expansion=2, chunk_size=4), draw_lact),
    "yaad": deep_model("yaad", draw_yaad, expansion=2),
    "moneta": deep_model("moneta", draw_channels, 4, 3.0, 4.0, expansion=2),
    "memora": deep_model("memora", draw_memora, 4, "simplex_size", expansion=2),
}


def memorize(rule, form, params, x):
    """(reads, state) of one row; x may also hold mask, resets and state."""

    def log(name):
        return jnp.log(jnp.maximum(x[name], memory.gates.SMALLEST_RETENTION)) if name in x else None

    found = memory.Gates(
        log_retention=log("retention"),
        log_momentum=log("momentum"),
        step_size=x["step_size"],
        mask=x.get("mask"),
        bias_gate=x.get("bias_gate"),
        log_key_retention=log("key_retention"),
        log_value_retention=log("value_retention"),
        key_step_size=x.get("key_step_size"),
        value_step_size=x.get("value_step_size"),
        erase=x.get("erase"),
        window_weight=x.get("window_weight"),
    )
    state = x["state"] if "state" in x else memory.init_state(rule, params)
    arrays = (x[name] for name in ("queries", "keys", "values"))
    return memory.memorize(rule, params, state, *arrays, found, form, resets=x.get("resets"))


@functools.cache
def program(rule, form, batched, optimized):
    answer = functools.partial(memorize, rule, form)
    answer = jax.vmap(answer, in_axes=(None, 0)) if batched else answer
    return jax.jit(answer, compiler_options={"xla_backend_optimization_level": 3 if optimized else 0})


def run(rule, form, params, inputs, dtype=np.float64, batched=False):
    """(reads, state) as numpy; float64 compiles without optimization, twice as fast, float32 as users run it."""

    time = inputs["queries"].shape[:-1]
    inputs = {"retention": np.ones(time), "step_size": np.ones(time)} | inputs

    def cast(leaf):
        return jnp.asarray(leaf, dtype if np.issubdtype(np.asarray(leaf).dtype, np.floating) else None)

    with jax.enable_x64(dtype == np.float64):
        answer = program(rule, form, batched, dtype == np.float32)(*jax.tree.map(cast, (params, inputs)))
        return jax.tree.map(np.asarray, answer)


def rows(model, inputs):
    """TIME + 1 rows of the same inputs from the start state, position traced; free to be changed."""
    count = TIME + 1

    def repeat(leaf):
        return np.repeat(np.asarray(leaf)[None], count, axis=0)

    weights = tuple(repeat(w) for w in model.params["weights"])
    momentum = tuple(np.zeros_like(w) for w in weights) if model.rule.algorithm.has_momentum else ()
    reach, window = model.rule.algorithm.window - 1, None
    if reach:
        token = np.zeros((count, reach, HEAD_DIM))
        window = memory.state.WindowTokens(token, token, np.zeros((count, reach, len(weights))))
    total = np.zeros((count, len(weights))) if model.rule.algorithm.steps_by_chunk else None
    return {name: repeat(leaf) for name, leaf in inputs.items()} | {
        "mask": np.ones((count, TIME), bool),
        "resets": np.zeros((count, TIME), bool),
        "state": memory.MemoryState(weights, momentum, weights, np.zeros(count, np.int32), window, total),
    }


def error(got, expected):
    """Relative RMS."""
    assert got.shape == expected.shape
    return np.sqrt(np.mean((got - expected) ** 2) / np.mean(np.square(expected)))
