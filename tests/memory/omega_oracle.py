"""The Omega rule token by token in numpy float64, from the equations of ATLAS (arXiv 2505.23735); no code of the
package.

    S_t = eta_t S_{t-1} - sum_{j=0..window-1} gamma_t[j] theta_{t-j} u_{t-j} ,   W_t = a_t W_{t-1} + S_t

u_i is the gradient of ||M(k_i) - v_i||^2 / 2, or of -<M(k_i), v_i>, at the memory of the start of token t's chunk, also
of tokens of the chunk before; gamma_t[0] = 1. Without momentum S_t is the sum alone.
"""

import itertools

import miras_oracle
import numpy as np


def monomials(x, scale):
    """Products of every choice of i entries of x, with repetition and without order, times scale[i], i = 0 .. p."""
    return np.array(
        [
            a * np.prod([x[i] for i in chosen])
            for degree, a in enumerate(scale)
            for chosen in itertools.combinations_with_replacement(range(len(x)), degree)
        ]
    )


def read(weights, norm_scale, degree_scale, x):
    """x + norm(MLP(phi(x))); without a norm, x W; phi(x) = x without `degree_scale`."""
    if degree_scale is None:
        return miras_oracle.read(weights, norm_scale, x)
    features = monomials(x, degree_scale)
    hidden = features @ weights[0]
    for matrix in weights[1:]:
        hidden = miras_oracle.gelu(hidden) @ matrix
    centred = hidden - np.mean(hidden)
    return x + norm_scale * centred / np.sqrt(np.mean(centred**2) + miras_oracle.LAYER_NORM_EPSILON)


def omega(
    queries, keys, values, start, norm_scale, degree_scale=None, *, window, chunk_size, retention, step_size,
    window_weight=None, momentum=None, bias="l2",
):  # fmt: skip
    """Reads [time, d]. retention, step_size, momentum [time, matrices]; window_weight [time, window - 1]."""
    weights, reads = list(start), []
    past = [np.zeros_like(w) for w in weights]
    for t in range(len(keys)):
        if t % chunk_size == 0:
            anchor = list(weights)
        total = [np.zeros_like(w) for w in weights]
        for j in range(min(window, t + 1)):
            gamma, key = 1.0 if j == 0 else window_weight[t, j - 1], keys[t - j]
            answer = read(anchor, norm_scale, degree_scale, key) if bias == "l2" else 0.0
            cotangent = answer - values[t - j]
            inputs = key if degree_scale is None else monomials(key, degree_scale)
            for i, u in enumerate(miras_oracle.gradients(anchor, norm_scale, inputs, cotangent)):
                total[i] += gamma * step_size[t - j, i] * u
        for i in range(len(weights)):
            past[i] = (0.0 if momentum is None else momentum[t, i] * past[i]) - total[i]
            weights[i] = retention[t, i] * weights[i] + past[i]
        reads.append(read(weights, norm_scale, degree_scale, queries[t]))
    return np.array(reads)
