"""Hope token by token in numpy float64, from the equations of Nested Learning (arXiv 2512.24695, by secondary notes);
no code of the package. Vectors are rows, fast matrices [in, out]; every memory has two of them, and gelu between.
"""

import numpy as np

LAYER_NORM_EPSILON = 1e-6


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def unit(x):
    return x / np.sqrt(np.sum(np.square(x), axis=-1, keepdims=True) + 1e-6)


def rms_norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x):
    tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)


def read(kind, weights, scale, x, by=1.0):
    """kind: "residual_mlp", x + LN(MLP(by x)); "skip_mlp", x + MLP(by x); "mlp"."""
    z = gelu(by * x @ weights[0]) @ weights[1]
    if kind == "residual_mlp":
        z = (z - z.mean()) / np.sqrt(z.var() + LAYER_NORM_EPSILON) * scale
    return z if kind == "mlp" else x + z


def gradients(kind, weights, scale, key, value, by=1.0):
    """Those of 1/2 ||M(key) - value||^2 by both matrices."""
    hidden = by * key @ weights[0]
    z = gelu(hidden) @ weights[1]
    delta = read(kind, weights, scale, key, by) - value
    if kind == "residual_mlp":
        deviation = np.sqrt(z.var() + LAYER_NORM_EPSILON)
        normalized, scaled = (z - z.mean()) / deviation, delta * scale
        delta = (scaled - scaled.mean() - normalized * np.mean(scaled * normalized)) / deviation
    inner = (weights[1] @ delta) * gelu_slope(hidden)
    return [np.outer(by * key, inner), np.outer(gelu(hidden), delta)]


def delta_descent(weights, anchor, start, scale, key, value, retention, step, share, by):
    """(a I - theta x^T x) W_0 - theta grad, a W_1 - theta grad, x = by k, the erased term and the gradient at the
    anchor; kept is what differs from `start`. share: of the step, that a bounded slope leaves."""
    u = gradients("residual_mlp", anchor, scale, key, value, by)
    u[0] = u[0] + np.outer(by * key, by * key @ anchor[0])
    return [m + retention * (w - m) - share * step * g for w, m, g in zip(weights, start, u, strict=True)]


def hope(queries, keys, values, start, scale, chunk_size, retention, step_size, momentum=None, kind="residual_mlp"):
    """Reads [time, d] of one memory with fixed keys and values, forgetting to zero; gates [time, 2]."""
    weights, past, reads = list(start), [np.zeros_like(w) for w in start], []
    for t in range(len(keys)):
        if t % chunk_size == 0:
            anchor = list(weights)
        u = gradients(kind, anchor, scale, keys[t], values[t])
        u[0] = u[0] + np.outer(keys[t], keys[t] @ anchor[0])
        for i in range(2):
            past[i] = (0.0 if momentum is None else momentum[t, i] * past[i]) - step_size[t, i] * u[i]
            weights[i] = retention[t, i] * weights[i] + past[i]
        reads.append(read(kind, weights, scale, queries[t]))
    return np.array(reads)


def convolve(x, taps):
    """Causal, depthwise; the newest tap first."""
    rows = np.concatenate([np.zeros((len(taps) - 1, x.shape[1])), x])
    return sum(taps[lag] * rows[len(taps) - 1 - lag :][: len(x)] for lag in range(len(taps)))


def shared(keys, shares, t, opened):
    """What the earlier tokens of its chunk leave of the step of token t."""
    left = 1.0
    for j in range(opened, t):
        left *= 1 - min(min(shares[j], 1) * max(0.0, keys[j] @ keys[t]) ** 4, 0.98)
    return left


def fresh_variance(head_dim, by):
    """That of what the norm of a fresh memory is given for `by` times a unit key."""
    grid = np.linspace(-10, 10, 20_001)
    density = np.exp(-(grid**2) / 2) / np.sum(np.exp(-(grid**2) / 2))
    return np.sum(density * gelu(grid * by * head_dim**-0.5) ** 2) * (head_dim - 1) / head_dim


def self_referential(p, x, heads, chunk_size, bound, max_step_size, by):
    """x [time, dim] -> [time, dim]. p: the layer's parameters by path. bound: of step sizes. max_step_size: the same
    as a share of the error, where near keys share their steps; else None. by: the factor of what hidden layers read."""
    width = x.shape[1] // heads
    split = lambda y: y.reshape(len(y), heads, width)  # noqa: E731
    tokens = unit(split(silu(convolve(x, p["convolution", "kernel"]))))
    queries = convolve(x @ p["query", "projection", "kernel"], p["query", "convolution", "kernel"])
    queries = unit(split(silu(queries)))
    out = np.zeros_like(tokens)
    for h in range(heads):
        starts = [[p["start_weights", i][n, h] for i in range(2)] for n in range(5)]
        scales = [p["slow", "norm_scale"][n, h] for n in range(5)]
        weights, keys, shares = [list(w) for w in starts], [], []
        for t in range(len(x)):
            if t % chunk_size == 0:
                anchors = [list(w) for w in weights]
            say = lambda n, y: read("residual_mlp", anchors[n], scales[n], y, by)  # noqa: B023, E731
            key, value = unit(say(0, tokens[t, h])), unit(say(1, tokens[t, h]))
            logits = [unit(say(2 + i, tokens[t, h])) @ p["gate_kernel",][i, h] + p["gate_bias",][i, h] for i in (0, 1)]
            step, retention = bound * sigmoid(logits[0]), 1 - sigmoid(logits[1])
            keys.append(key)
            if max_step_size is not None:
                shares.append(max_step_size * sigmoid(logits[0]))
                step *= shared(keys, shares, t, t - t % chunk_size)
            targets = [say(n, value) for n in range(5)]
            for n in range(5):
                z = gelu(by * key @ anchors[n][0]) @ anchors[n][1]
                share = min(1, z.var() / fresh_variance(width, by))
                token = (scales[n], key, targets[n], retention, step, share, by)
                weights[n] = delta_descent(weights[n], anchors[n], starts[n], *token)
            out[t, h] = read("residual_mlp", weights[4], scales[4], queries[t, h], by)
    y = rms_norm(out, p["norm", "scale"]).reshape(x.shape) * silu(x @ p["output_gate", "kernel"])
    return y @ p["output_projection", "kernel"]


def continuum(p, x, chunks, independent=False):
    """x [time, dim] -> [time, dim], window after window, forgetting to the start."""
    values, z, answers = x @ p["value", "kernel"], x, []
    for level, size in enumerate(chunks):
        inputs = rms_norm(x if independent else z, p["norms", level, "scale"])
        start = [p["start_weights", level, i] for i in range(2)]
        weights, z = list(start), np.zeros_like(x)
        logits = x @ p["gate_kernel",][:, level] / np.sqrt(x.shape[1]) + p["gate_bias",][level]
        unit_of_steps = 0.425 * start[0].shape[1] + 0.456 * x.shape[1]
        for t in range(len(x)):
            if t % size == 0:
                anchor = list(weights)
            z[t] = read("mlp", anchor, None, inputs[t])
            step, retention = sigmoid(logits[t, 0]) / unit_of_steps / size, 1 - sigmoid(logits[t, 1])
            found = gradients("mlp", anchor, None, inputs[t], values[t])
            weights = [m + retention * (w - m) - step * g for w, m, g in zip(weights, start, found, strict=True)]
        answers.append(z)
    if independent:
        z = sum(share * answer for share, answer in zip(p["shares",], answers, strict=True))
    return z * p["scale",]
