"""The linear models after Miras' Table 1 by their published recurrences, token by token in numpy float64.

S is [d_k, d_v] and k a column, as their papers and their public reference recurrences have it; nothing is shared with
the package. Gates are plain values. Every function takes queries, keys, values [time, d] first and returns reads
[time, d].
"""

import numpy as np


def kimi_delta_attention(queries, keys, values, key_retention, step_size):
    """Kimi (arXiv 2510.26692): S <- Diag(a) S, then S <- S + beta k (v - k^T S)^T, o = S^T q."""
    state, reads = np.zeros((keys.shape[1], values.shape[1])), []
    for q, k, v, a, beta in zip(queries, keys, values, key_retention, step_size, strict=True):
        state = a[:, None] * state
        state = state + beta * np.outer(k, v - state.T @ k)
        reads.append(state.T @ q)
    return np.array(reads)


def gated_deltanet_2(queries, keys, values, key_retention, erase):
    """Gated DeltaNet-2 (arXiv 2605.22791): S <- (I - k (b * k)^T) Diag(e^g) S + k (w * v)^T; values are w * v."""
    state, reads = np.zeros((keys.shape[1], values.shape[1])), []
    for q, k, v, a, b in zip(queries, keys, values, key_retention, erase, strict=True):
        transition = (np.eye(len(k)) - np.outer(k, b * k)) @ np.diag(a)
        state = transition @ state + np.outer(k, v)
        reads.append(state.T @ q)
    return np.array(reads)


def comba(queries, keys, values, retention, step_size, erase):
    """Comba (arXiv 2506.02475): S <- e^g S; u = beta (v - p^T S); S <- S + k u^T, p = b * k; queries are q - d k."""
    state, reads = np.zeros((keys.shape[1], values.shape[1])), []
    for q, k, v, a, beta, b in zip(queries, keys, values, retention, step_size, erase, strict=True):
        state = a * state
        u = beta * (v - state.T @ (b * k))
        state = state + np.outer(k, u)
        reads.append(state.T @ q)
    return np.array(reads)


def preconditioned_delta(queries, keys, values, retention, step_size, key_step_size):
    """Preconditioned DeltaNet (arXiv 2604.21100): S <- a S; u = beta (v - k^T S); S <- S + (m * k) u^T."""
    return preconditioned_kimi(
        queries, keys, values, np.repeat(retention[:, None], keys.shape[1], axis=1), step_size, key_step_size
    )


def preconditioned_kimi(queries, keys, values, key_retention, step_size, key_step_size):
    """The same with a decay of every channel."""
    state, reads = np.zeros((keys.shape[1], values.shape[1])), []
    for q, k, v, a, beta, m in zip(queries, keys, values, key_retention, step_size, key_step_size, strict=True):
        state = a[:, None] * state
        u = beta * (v - state.T @ k)
        state = state + np.outer(m * k, u)
        reads.append(state.T @ q)
    return np.array(reads)


def mamba3(queries, keys, values, retention, step, share, before):
    """Mamba-3 (arXiv 2603.15569): S <- a S + (1 - l) D a k' v'^T + l D k v^T, k', v' those of the token before."""
    state, reads = np.zeros((keys.shape[1], values.shape[1])), []
    for q, k, v, a, size, l in zip(queries, keys, values, retention, step, share, strict=True):  # noqa: E741
        state = a * state + (1 - l) * size * a * np.outer(*before) + l * size * np.outer(k, v)
        before = k, v
        reads.append(state.T @ q)
    return np.array(reads)


def mamba3_mimo(queries, keys, values, retention, weights):
    """The same with several keys: S <- a S, then S <- S + w k v^T of every write [time, n], each read after."""
    state, reads = np.zeros((keys.shape[2], values.shape[2])), []
    for q, k, v, a, w in zip(queries, keys, values, retention, weights, strict=True):
        state = a * state
        reads.append([])
        for query, *write, weight in zip(q, k, v, w, strict=True):
            state = state + weight * np.outer(*write)
            reads[-1].append(state.T @ query)
    return np.array(reads)
