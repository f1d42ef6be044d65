"""Memories that take one orthogonal step a chunk, token by token in numpy float64, from the equations of ATLAS (arXiv
2505.23735) and LaCT (arXiv 2505.23884); no code of the package.

    S_t = eta_t S_{t-1} - sum_{j < window} gamma_t[j] theta_{t-j} u_{t-j}        u at the memory of the chunk's start
    W_t = a_t W_{t-1} ,  after a chunk's last token W_t + mean(theta) NS(S_t)    its read sees that

NS by the singular values of S, on which Newton-Schulz is a polynomial. LaCT: eta acts at a chunk's first token alone,
and after the step every output's incoming weights get the norm back that they started with.
"""

import numpy as np
import oracle

MUON = [(3.4445, -4.7750, 2.0315)] * 5
LACT = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


def newton_schulz(matrix, coefficients):
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.sqrt(np.sum(values**2))
    for a, b, c in coefficients:
        values = a * values + b * values**3 + c * values**5
    return left @ np.diag(values) @ right


def memorize(
    rule, params, queries, keys, values, *, coefficients, retention, step_size, momentum, window_weight=None, window=1,
    once_a_chunk=False, weight_norm=False,
):  # fmt: skip
    """Reads [time, d] of an `oracle.Rule`, and the weights after the last token. retention, step_size, momentum [time,
    matrices]; window_weight [time, window - 1]; once_a_chunk: of eta."""
    start, scale, reads = [np.array(w) for w in params["weights"]], params.get("norm_scale"), []
    weights, past = list(start), [np.zeros_like(w) for w in start]
    for t in range(len(keys)):
        if t % rule.chunk_size == 0:
            anchor = list(weights)
        for i in range(len(weights)):
            eta = momentum[t, i] if t % rule.chunk_size == 0 or not once_a_chunk else 1.0
            past[i] = eta * past[i]
        for j in range(min(window, t + 1)):
            gamma = 1.0 if j == 0 else window_weight[t, j - 1]
            *_, gradients = oracle.inner_gradient(rule, anchor, scale, keys[t - j], values[t - j])
            for i, u in enumerate(gradients):
                past[i] = past[i] - gamma * step_size[t - j, i] * u
        for i, first in enumerate(start):
            goal = first if rule.forget_to_start else 0.0
            weights[i] = goal + retention[t, i] * (weights[i] - goal)
            if (t + 1) % rule.chunk_size == 0:
                mean = np.mean(step_size[t + 1 - rule.chunk_size : t + 1, i])
                weights[i] = weights[i] + mean * newton_schulz(past[i], coefficients)
                if weight_norm:
                    weights[i] = weights[i] * np.linalg.norm(first, axis=0) / np.linalg.norm(weights[i], axis=0)
        reads.append(oracle.read(rule, weights, scale, queries[t]))
    return np.array(reads), weights
