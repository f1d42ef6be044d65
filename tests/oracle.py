"""The memory's published recurrence, token by token in numpy float64, with hand-derived inner gradients.

Written from the papers (Titans, arXiv 2501.00663, eq. 8-14 and section 3.2) and sharing no code with the package: every
number the memory tests assert comes from here. Vectors are rows, `x @ W`; a fast matrix is [in, out].
"""

from dataclasses import dataclass, replace

import numpy as np

LAYER_NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Rule:
    """architecture "mlp" | "residual_mlp" | "gated_mlp", as deep as its weights; bias "l2" | "dot_product".

    forget_to_start: forgetting leads to the start weights, not to zero.
    bound_slope: gradients times min(1, v / v_0), v the variance that the norm divides by, v_0 that of a fresh memory.
    scale_keys: a residual MLP with a hidden layer reads sqrt(head_dim) times its input.
    """

    architecture: str
    bias: str
    has_momentum: bool
    chunk_size: int
    forget_to_start: bool = False
    bound_slope: bool = False
    scale_keys: bool = False

    def scale(self, weights):
        hidden = self.architecture == "residual_mlp" and len(weights) > 1
        return np.sqrt(len(weights[0])) if self.scale_keys and hidden else 1.0


@dataclass(frozen=True)
class State:
    """Fast weights, momentum and anchor: lists of [in, out]; position: tokens of the open chunk already seen."""

    weights: list
    momentum: list
    anchor: list
    position: int = 0


def start(params):
    weights = [np.array(matrix, np.float64) for matrix in params["weights"]]
    return State(weights, [np.zeros_like(matrix) for matrix in weights], weights)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x):
    tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)


def silu(x):
    return x / (1 + np.exp(-x))


def silu_slope(x):
    sigmoid = 1 / (1 + np.exp(-x))
    return sigmoid * (1 + x * (1 - sigmoid))


def normalize(z):
    """Layer norm without gain: the normalised vector and the deviation it was divided by."""
    deviation = np.sqrt(np.mean((z - np.mean(z)) ** 2) + LAYER_NORM_EPSILON)
    return (z - np.mean(z)) / deviation, deviation


def read(rule, weights, norm_scale, x):
    """The memory's output [head_dim] for one input [head_dim]."""
    if rule.architecture == "gated_mlp":
        return (silu(x @ weights[0]) * (x @ weights[1])) @ weights[2]
    hidden = rule.scale(weights) * x
    for layer, matrix in enumerate(weights):
        hidden = (gelu(hidden) if layer > 0 else hidden) @ matrix
    if rule.architecture == "residual_mlp":
        return x + normalize(hidden)[0] * norm_scale
    return hidden


def fresh_variance(depth, head_dim, scale=1.0):
    """What the norm of a fresh residual MLP is given for a unit key times scale, by summing over a fine grid of normal
    numbers."""
    grid = np.linspace(-10, 10, 20_001)
    density = np.exp(-(grid**2) / 2) / np.sum(np.exp(-(grid**2) / 2))
    variance = scale**2 / head_dim
    for _ in range(depth - 1):
        variance = np.sum(density * gelu(np.sqrt(variance) * grid) ** 2)
    return variance * (head_dim - 1) / head_dim


def inner_loss(rule, output, value):
    """The bias at one output, and its derivative by the output."""
    if rule.bias == "l2":
        return 0.5 * np.sum((output - value) ** 2), output - value
    return -np.dot(output, value), -value


def inner_gradient(rule, weights, norm_scale, key, value):
    """One token's loss, its derivative by the output, and its derivative by every fast matrix."""
    loss, cotangent = inner_loss(rule, read(rule, weights, norm_scale, key), value)
    if rule.architecture == "gated_mlp":
        gate, up = key @ weights[0], key @ weights[1]
        inner = weights[2] @ cotangent
        gradients = [
            np.outer(key, inner * up * silu_slope(gate)),
            np.outer(key, inner * silu(gate)),
            np.outer(silu(gate) * up, cotangent),
        ]
        return loss, cotangent, gradients
    inputs, outputs = [rule.scale(weights) * key], []
    for matrix in weights:
        outputs.append(inputs[-1] @ matrix)
        inputs.append(gelu(outputs[-1]))
    delta = cotangent
    if rule.architecture == "residual_mlp":
        normalized, deviation = normalize(outputs[-1])
        scaled = cotangent * norm_scale
        delta = (scaled - np.mean(scaled) - normalized * np.mean(scaled * normalized)) / deviation
        if rule.bound_slope:
            fresh = fresh_variance(len(weights), len(key), rule.scale(weights))
            delta = delta * min(1, np.var(outputs[-1]) / fresh)
    gradients = [np.outer(inputs[-2], delta)]
    for layer in range(len(weights) - 2, -1, -1):
        delta = (weights[layer + 1] @ delta) * gelu_slope(outputs[layer])
        gradients.insert(0, np.outer(inputs[layer], delta))
    return loss, cotangent, gradients


def memorize(
    rule, params, state, queries, keys, values, forget, momentum, step_size, mask=None, resets=None, initial=None
):
    """Reads [time, head_dim], the last state, losses [time] and cotangent norms [time] at the anchor.

    forget (alpha), momentum (eta) and step_size (theta): [time] or [time, matrices]. Where the mask is False,
    padding only reads: it changes nothing of the state, takes no place in a chunk and has surprise 0. A reset replaces
    the state before its token by `initial` (default: the start).
    """
    norm_scale = params.get("norm_scale")
    reads, losses, norms = [], [], []
    for token in range(len(keys)):
        if resets is not None and resets[token]:
            state = start(params) if initial is None else initial
        if mask is not None and not mask[token]:
            reads.append(read(rule, state.weights, norm_scale, queries[token]))
            losses.append(0.0)
            norms.append(0.0)
            continue
        anchor = state.weights if state.position == 0 else state.anchor
        loss, cotangent, gradients = inner_gradient(rule, anchor, norm_scale, keys[token], values[token])
        new_weights, new_momentum = [], []
        for matrix, gradient in enumerate(gradients):
            alpha, eta, theta = (
                gate[token] if np.ndim(gate) == 1 else gate[token, matrix] for gate in (forget, momentum, step_size)
            )
            past = eta * state.momentum[matrix] if rule.has_momentum else 0.0
            new_momentum.append(past - theta * gradient)
            goal = np.array(params["weights"][matrix], np.float64) if rule.forget_to_start else 0.0
            new_weights.append(goal + (1 - alpha) * (state.weights[matrix] - goal) + new_momentum[-1])
        position = (state.position + 1) % rule.chunk_size
        state = State(new_weights, new_momentum, anchor, position)
        if position == 0:
            state = replace(state, anchor=new_weights)
        reads.append(read(rule, state.weights, norm_scale, queries[token]))
        losses.append(loss)
        norms.append(np.linalg.norm(cotangent))
    return np.reshape(reads, np.shape(queries)), state, np.array(losses), np.array(norms)
