"""Every model of Miras' Table 1 by its published recurrence, token by token in numpy float64.

Written from the papers (Miras table 1, eq 10-27; TTT, arXiv 2407.04620; Kimi, RWKV-7 and Mesa) and sharing no code with
the package. A matrix memory is W [in, out] read as `x @ W`, so what the papers write as `M Diag(a)` is `Diag(a) W`.
Gates are plain values: retention a = 1 - alpha, step size theta. Every function takes queries, keys, values [time, d]
first and returns reads [time, d].
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

LAYER_NORM_EPSILON = 1e-6


# Matrix memories. All start from zero.


def recurrence(queries, tokens, step):
    """Reads [time, d] of W <- step(W, *token), W_0 = 0."""
    width = queries.shape[1]
    weights, reads = np.zeros((width, width)), []
    for query, token in zip(queries, zip(*tokens, strict=True), strict=True):
        weights = step(weights, *token)
        reads.append(query @ weights)
    return np.array(reads)


def linear_attention(queries, keys, values):
    return recurrence(queries, (keys, values), lambda W, k, v: W + np.outer(k, v))


def retnet(queries, keys, values, retention: float):
    return recurrence(queries, (keys, values), lambda W, k, v: retention * W + np.outer(k, v))


def lightning(queries, keys, values, retention: float):
    """The same recurrence as a sum over the past: sum_i a^(t-i) <q_t, k_i> v_i."""
    distance = np.arange(len(keys))[:, None] - np.arange(len(keys))
    decay = np.where(distance >= 0, retention ** np.maximum(distance, 0), 0.0)
    return (decay * (queries @ keys.T)) @ values


def mamba2(queries, keys, values, step_size, rate: float):
    """a_t = exp(-rate step_t) and the input step_t k_t^T v_t, one scalar of each per head."""
    return recurrence(
        queries, (keys, values, step_size), lambda W, k, v, step: np.exp(-rate * step) * W + step * np.outer(k, v)
    )


def gla(queries, keys, values, key_retention):
    return recurrence(queries, (keys, values, key_retention), lambda W, k, v, a: np.diag(a) @ W + np.outer(k, v))


def hgrn2(queries, values, key_retention):
    return recurrence(queries, (values, key_retention), lambda W, v, a: np.diag(a) @ W + np.outer(1 - a, v))


def dfw(queries, keys, values, key_retention, value_retention):
    def step(W, k, v, a, b):
        return np.outer(a, b) * W + np.outer(k, v)

    return recurrence(queries, (keys, values, key_retention, value_retention), step)


def deltanet(queries, keys, values, step_size):
    def step(W, k, v, beta):
        return (np.eye(len(k)) - beta * np.outer(k, k)) @ W + beta * np.outer(k, v)

    return recurrence(queries, (keys, values, step_size), step)


def longhorn(queries, keys, values, step_size):
    """W = argmin theta ||k W - v||^2 + ||W - W'||^2, by its normal equations."""

    def step(W, k, v, theta):
        return np.linalg.solve(np.eye(len(k)) + theta * np.outer(k, k), W + theta * np.outer(k, v))

    return recurrence(queries, (keys, values, step_size), step)


def gated_deltanet(queries, keys, values, retention, step_size):
    """retention [time], or [time, d]: Kimi Delta Attention, whose decay acts on key channels. The decay comes first."""

    def step(W, k, v, a, beta):
        decay = np.diag(np.broadcast_to(a, k.shape))
        return (np.eye(len(k)) - beta * np.outer(k, k)) @ decay @ W + beta * np.outer(k, v)

    return recurrence(queries, (keys, values, retention, step_size), step)


def rwkv7(queries, removal_keys, keys, values, key_retention, rate):
    """W = (Diag(w) - (a * r)^T r) W + k^T v."""

    def step(W, r, k, v, w, a):
        return (np.diag(w) - np.outer(a * r, r)) @ W + np.outer(k, v)

    return recurrence(queries, (removal_keys, keys, values, key_retention, rate), step)


def delta_product(queries, keys, values, retention, step_size):
    """keys, values [time, n, d], step_size [time, n]: W = A W + B, with the products of 3.2 written out."""

    def step(W, k, v, a, beta):
        transition, written = a * np.eye(k.shape[1]), np.zeros_like(W)
        for j in range(len(k)):
            reflection = np.eye(k.shape[1]) - beta[j] * np.outer(k[j], k[j])
            transition, written = reflection @ transition, reflection @ written + beta[j] * np.outer(k[j], v[j])
        return transition @ W + written

    return recurrence(queries, (keys, values, retention, step_size), step)


def mesa(queries, keys, values, retention, step_size, ridge):
    """argmin_W sum_i zeta_ti ||k_i W - v_i||^2 + ||ridge^(1/2) W||^2 with zeta_ti = theta_i prod_{j>i} a_j, solved anew
    at every token; ridge [d]."""
    reads = []
    for t in range(len(keys)):
        zeta = np.array([step_size[i] * np.prod(retention[i + 1 : t + 1]) for i in range(t + 1)])
        k, v = keys[: t + 1], values[: t + 1]
        weights = np.linalg.solve(k.T @ (zeta[:, None] * k) + np.diag(ridge), k.T @ (zeta[:, None] * v))
        reads.append(queries[t] @ weights)
    return np.array(reads)


def mesa_sherman_morrison(queries, keys, values, step_size, ridge):
    """Mesa without forgetting, its inverse kept up to date by rank-one corrections."""
    inverse, written, reads = np.diag(1 / ridge), np.zeros((len(ridge), len(ridge))), []
    for query, k, v, theta in zip(queries, keys, values, step_size, strict=True):
        image = inverse @ k
        inverse = inverse - theta * np.outer(image, image) / (1 + theta * k @ image)
        written = written + theta * np.outer(k, v)
        reads.append(query @ inverse @ written)
    return np.array(reads)


# Cotangents dl/dy of the attentional biases (3.3), of the residual r = y - v.


def dot_product_cotangent(r, v):
    return -v


def l2_cotangent(r):
    return r


def lp_cotangent(r, p):
    return p * np.sign(r) * np.abs(r) ** (p - 1)


def smooth_lp_cotangent(r, p, sharpness=50.0, epsilon=1e-6):
    """Remark 5 of Miras: sign(r) -> tanh(sharpness r), |r| -> (r^2 + epsilon)^(1/2)."""
    return p * np.tanh(sharpness * r) * (r**2 + epsilon) ** ((p - 1) / 2)


def huber_cotangent(r, delta):
    return np.clip(r, -delta, delta)


def huber_norm_cotangent(r, delta):
    return r * min(1.0, delta / np.linalg.norm(r))


def mixture_cotangent(r, delta, sharpness=50.0):
    return 2 * r if np.linalg.norm(r) <= delta else delta * np.tanh(sharpness * r)


def value_shift_cotangent(r, delta):
    return r + delta * r / np.linalg.norm(r)


# Retention gates (3.4): what is carried, what is read of it.


class Carry(NamedTuple):
    """weights(A) read at a chunk's start, close(A_t, A_0) carried on at its end; inside it, a read is of the weights of
    that, or moved along by the scalar slope(A) if there is one; per matrix."""

    weights: Callable = lambda a: a
    slope: Callable | None = lambda a: 1.0
    close: Callable = lambda a, opened: a


def soft_threshold(z, threshold):
    return np.sign(z) * np.maximum(np.abs(z) - threshold, 0)


def softmax(z):
    """Over the inputs: every column sums to 1."""
    shares = np.exp(z - np.max(z, axis=0))
    return shares / np.sum(shares, axis=0)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def q_norm(matrix, q):
    return np.sum(np.abs(matrix) ** q) ** (1 / q)


def f_divergence_step(weights, step, g):
    """W * g(step - zeta), one zeta per column such that the column keeps its sum (eq 18), by bisection."""
    closed = np.empty_like(weights)
    for j in range(weights.shape[1]):
        low, high = -200.0, 200.0
        for _ in range(200):
            zeta = 0.5 * (low + high)
            grew = np.sum(weights[:, j] * g(step[:, j] - zeta)) > np.sum(weights[:, j])
            low, high = (zeta, high) if grew else (low, zeta)
        closed[:, j] = weights[:, j] * g(step[:, j] - zeta)
    return closed


def elastic_net(threshold):
    return Carry(close=lambda a, _: soft_threshold(a, threshold))


def ftrl_elastic_net(threshold):
    return Carry(weights=lambda a: soft_threshold(a, threshold))


def norm_power(q, epsilon=1e-6):
    def slope(a):
        return (q_norm(a, q) + epsilon) ** (2 - q)

    return Carry(weights=lambda a: slope(a) * a, slope=slope)


def lq(q, epsilon=1e-6):
    """The exact minimiser."""
    p = q / (q - 1)

    def weights(a):
        return (q - 1) * np.sign(a) * np.abs(a) ** (p - 1) / (q_norm(a, p) + epsilon) ** (p - 2)

    return Carry(weights, None)


def kullback_leibler(size):
    return Carry(lambda z: size * softmax(z), None)


def f_divergence(g):
    return Carry(slope=None, close=lambda a, opened: f_divergence_step(opened, a - opened, g))


def bregman_logit():
    return Carry(sigmoid, None)


# Deep memories.


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x):
    tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)


def read(weights, scale, x):
    """x + scale * norm(gelu(x W_0) W_1 ...); without a scale, the linear memory x W_0."""
    if scale is None:
        return x @ weights[0]
    hidden = x @ weights[0]
    for matrix in weights[1:]:
        hidden = gelu(hidden) @ matrix
    centred = hidden - np.mean(hidden)
    return x + scale * centred / np.sqrt(np.mean(centred**2) + LAYER_NORM_EPSILON)


def gradients(weights, scale, key, cotangent):
    """d loss / d W of every matrix, the loss having `cotangent` at the read of `key`."""
    if scale is None:
        return [np.outer(key, cotangent)]
    inputs, outputs = [key], []
    for matrix in weights:
        outputs.append(inputs[-1] @ matrix)
        inputs.append(gelu(outputs[-1]))
    centred = outputs[-1] - np.mean(outputs[-1])
    deviation = np.sqrt(np.mean(centred**2) + LAYER_NORM_EPSILON)
    normal, scaled = centred / deviation, scale * cotangent
    delta = (scaled - np.mean(scaled) - normal * np.mean(scaled * normal)) / deviation
    found = [np.outer(inputs[-2], delta)]
    for layer in reversed(range(len(weights) - 1)):
        delta = (weights[layer + 1] @ delta) * gelu_slope(outputs[layer])
        found.insert(0, np.outer(inputs[layer], delta))
    return found


def descend(
    queries, keys, values, start, scale, cotangent, *, chunk_size, retention, step_size, momentum=None,
    carries=None, key_retention=None, value_retention=None, key_step_size=None, value_step_size=None,
):  # fmt: skip
    """A_t = a_t A_{t-1} + S_t, S_t = eta_t S_{t-1} - theta_t u_t, u at what is readable at the chunk's start.

    start: carried matrices; scale: of the norm, None for the linear memory; cotangent(r, t); retention, momentum, step
    size [time] or [time, matrices]. key_* [time, d] act on the rows of the first matrix, value_* on the columns of the
    last. carries: one `Carry` per matrix.
    """
    carries = carries or [Carry()] * len(start)
    carried, past, reads = list(start), [np.zeros_like(a) for a in start], []
    ends = len(start) - 1

    def gate(x, t, i):
        return x[t] if np.ndim(x) == 1 else x[t, i]

    def sides(x, y, t, i):
        """The factor of every entry of matrix i."""
        rows = np.ones(start[i].shape[0]) if x is None or i > 0 else x[t]
        columns = np.ones(start[i].shape[1]) if y is None or i < ends else y[t]
        return np.outer(rows, columns)

    for t in range(len(keys)):
        if t % chunk_size == 0:
            opened = list(carried)
            anchor = [carry.weights(a) for carry, a in zip(carries, opened, strict=True)]
        r = read(anchor, scale, keys[t]) - values[t]
        for i, u in enumerate(gradients(anchor, scale, keys[t], cotangent(r, t))):
            past[i] = 0 if momentum is None else gate(momentum, t, i) * past[i]
            past[i] = past[i] - gate(step_size, t, i) * sides(key_step_size, value_step_size, t, i) * u
            carried[i] = gate(retention, t, i) * sides(key_retention, value_retention, t, i) * carried[i] + past[i]
        closed = [carry.close(a, o) for carry, a, o in zip(carries, carried, opened, strict=True)]
        weights = [carry.weights(a) for carry, a in zip(carries, closed, strict=True)]
        if (t + 1) % chunk_size == 0:
            carried = closed
        else:
            for i, carry in enumerate(carries):
                if carry.slope is not None:
                    weights[i] = anchor[i] + carry.slope(opened[i]) * (carried[i] - opened[i])
        reads.append(read(weights, scale, queries[t]))
    return np.array(reads)


def ttt_linear(queries, keys, values, start, scale, step_size, chunk_size):
    """One matrix behind the norm, nothing forgotten."""
    return ttt_mlp(queries, keys, values, start[:1], scale, step_size, chunk_size)


def ttt_mlp(queries, keys, values, start, scale, step_size, chunk_size):
    kept = np.ones(len(keys))
    return descend(
        queries, keys, values, start, scale, lambda r, t: r, chunk_size=chunk_size, retention=kept, step_size=step_size
    )


def titans(queries, keys, values, start, scale, chunk_size, **gates):
    return descend(queries, keys, values, start, scale, lambda r, t: r, chunk_size=chunk_size, **gates)


def yaad(queries, keys, values, start, scale, delta, chunk_size, **gates):
    """delta [time, d], the coordinate reading of eq 26."""
    cotangent = lambda r, t: huber_cotangent(r, delta[t])  # noqa: E731
    return descend(queries, keys, values, start, scale, cotangent, chunk_size=chunk_size, **gates)


def moneta(queries, keys, values, start, scale, p, q, chunk_size, **gates):
    """start: the accumulators A_0."""
    cotangent = lambda r, t: smooth_lp_cotangent(r, p)  # noqa: E731
    carries = [norm_power(q)] * len(start)
    return descend(queries, keys, values, start, scale, cotangent, chunk_size=chunk_size, carries=carries, **gates)


def memora(queries, keys, values, start, scale, sizes, chunk_size, **gates):
    """start: logits; sizes: the simplex size of every matrix."""
    carries = [kullback_leibler(size) for size in sizes]
    return descend(queries, keys, values, start, scale, lambda r, t: r, chunk_size=chunk_size, carries=carries, **gates)


def token_rule(queries, keys, values, weights, scale, step, chunk_size=1):
    """A gate's published rule on the weights themselves: W_i <- step(W_i, u_i, t, i) at every token, L2 bias, u taken
    at the weights of the chunk's start."""
    reads = []
    for t in range(len(keys)):
        anchor = weights if t % chunk_size == 0 else anchor  # noqa: F821
        found = gradients(anchor, scale, keys[t], read(anchor, scale, keys[t]) - values[t])
        weights = [step(w, u, t, i) for i, (w, u) in enumerate(zip(weights, found, strict=True))]
        reads.append(read(weights, scale, queries[t]))
    return np.array(reads)


def kullback_leibler_rule(retention, step_size, size):
    """Eq 21 and 27 on log W: W = c Softmax(a log W' - theta u); retention(t, i) is a number or one per entry."""
    return lambda w, u, t, i: size[i] * softmax(retention(t, i) * np.log(w) - step_size[t] * u)


def f_divergence_rule(step_size, g):
    return lambda w, u, t, i: f_divergence_step(w, -step_size[t] * u, g)


def bregman_logit_rule(step_size):
    return lambda w, u, t, i: sigmoid(np.log(w / (1 - w)) - step_size[t] * u)


def elastic_net_rule(retention, step_size, threshold):
    return lambda w, u, t, i: soft_threshold(retention[t] * w - step_size[t] * u, threshold)
