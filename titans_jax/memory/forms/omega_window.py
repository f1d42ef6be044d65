"""The window of the Omega rule (ATLAS, arXiv 2505.23735): steps that sum the gradients of the last tokens.

    S_t = eta_t S_{t-1} - sum_j gamma_t[j] theta_{t-j} u_{t-j} ,   j = 0 .. window - 1 ,   gamma_t[0] = 1

A window reaches at most into the chunk before, and its tokens do not depend on the memory. So the tokens before a chunk
are laid out with it before the scan over chunks, and their sums are banded matrices (memory/later_models.md, The
Omega rule). Shapes: w window, c tokens of a chunk, m fast matrices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.chunk_algorithm import MemoryInputs
from titans_jax.memory.forms.decay import Coefficients, block_coefficients
from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.memory.state import Matrices, MemoryState, WindowTokens
from titans_jax.ops.matmul import matmul, to_state_dtype


def no_tokens(rule: MemoryRule, weights: Matrices) -> WindowTokens | None:
    """The window before the first token, w - 1 places without a token; None without a window."""
    reach = rule.algorithm.window - 1
    if reach == 0:
        return None
    token = jnp.zeros((reach, weights[-1].shape[1]), weights[-1].dtype)
    return WindowTokens(token, token, jnp.zeros((reach, len(weights)), weights[-1].dtype))


def after(window: WindowTokens, tokens: WindowTokens) -> WindowTokens:
    """The tokens of a window and those after it, all in the dtypes of the latter."""
    return jax.tree.map(lambda old, new: jnp.concatenate([old.astype(new.dtype), new]), window, tokens)


def latest(tokens: WindowTokens, reach: int) -> WindowTokens:
    """The last `reach` of some tokens as a state carries them."""
    return jax.tree.map(lambda x: to_state_dtype(x[x.shape[0] - reach :]), tokens)


def lag_weights(window_weight: jax.Array) -> jax.Array:
    """[.., w] from [.., w - 1]: the weights of a token's window, in the tokens' order, its own last."""
    return jnp.concatenate([window_weight[..., ::-1], jnp.ones_like(window_weight[..., :1])], axis=-1)


def window_matrix(window_weight: jax.Array) -> jax.Array:
    """[c, w - 1 + c] from [c, w - 1]: gamma_t[t - i] at (t, i), columns being the window before the chunk and its own
    tokens. Each row starts one column further right: rows padded with c zeros are flattened, and cut one shorter."""
    tokens, reach = window_weight.shape
    rows = jnp.pad(lag_weights(window_weight), ((0, 0), (0, tokens))).reshape(-1)
    return rows[: rows.size - tokens].reshape(tokens, reach + tokens)


def window_coefficients(gates: Gates, tile: int | None) -> Coefficients:
    """`Coefficients` of many blocks and matrices, leaves [blocks, m, ...], whose G and N have a column for each token
    of the window before the block too: those of steps of size 1, times the matrix of what every step sums.

    gates: [blocks, c, ...], step_size [blocks, w - 1 + c, m].
    """
    steps = block_coefficients(unit_steps(gates), None, tile)
    step_size = jnp.swapaxes(gates.step_size, 1, 2)[:, :, None]
    sums = jax.vmap(window_matrix)(gates.window_weight)[:, None] * step_size
    return of_sums(steps, lambda x: matmul(x, sums, sums.dtype))


def unit_steps(gates: Gates) -> Gates:
    """The gates of a chunk's own tokens, with steps of size 1, from those of `add_window`."""
    return dataclasses.replace(gates, step_size=jnp.ones_like(gates.log_retention), window_weight=None)


def of_sums(steps: Coefficients, times_sums: Callable[[jax.Array], jax.Array]) -> Coefficients:
    """`Coefficients` of steps of size 1 -> of steps that are sums over windows: times_sums(x) is x times the matrix
    of what every step sums."""
    G, N = (None if x is None else times_sums(x) for x in (steps.G, steps.N))
    return dataclasses.replace(steps, G=G, N=N)


def add_window(
    rule: MemoryRule,
    inputs: MemoryInputs,
    offset: int | jax.Array,
    state: MemoryState,
    initial: MemoryState | None,
) -> MemoryInputs:
    """Inputs in chunks [blocks, c, ...] whose keys, values and step sizes begin with the window before each chunk,
    [blocks, w - 1 + c, ...].

    offset: slot of the first token; the state's window stands before it, wherever in a chunk that is. A document starts
    with the window of the initial state. Padding has step size 0: it is no token.
    """
    reach, gates = rule.algorithm.window - 1, inputs.gates
    mask = gates.mask
    step_size = gates.step_size if mask is None else jnp.where(mask[..., None], gates.step_size, 0)

    def add(chunks: jax.Array, before: jax.Array, first: jax.Array | None) -> jax.Array:
        slots = chunks.reshape(-1, chunks.shape[-1])
        slots = jnp.pad(slots, ((reach, 0), (0, 0)))
        slots = jax.lax.dynamic_update_slice_in_dim(slots, before.astype(slots.dtype), offset, axis=0)
        past = slots[: slots.shape[0] - reach].reshape(chunks.shape)[:, :reach]
        if inputs.resets is not None:
            past = jnp.where(inputs.resets[:, :1, None], first.astype(past.dtype)[None], past)
        return jnp.concatenate([past, slots[reach:].reshape(chunks.shape)], axis=1)

    starts = (None,) * 3 if initial is None else jax.tree.leaves(initial.window)
    written = (inputs.keys, inputs.values, step_size)
    each = zip(written, jax.tree.leaves(state.window), starts, strict=True)
    keys, values, step_size = (add(*one) for one in each)
    gates = dataclasses.replace(gates, step_size=step_size)
    return dataclasses.replace(inputs, keys=keys, values=values, gates=gates)


def last_window(rule: MemoryRule, inputs: MemoryInputs, last: jax.Array | None, state: MemoryState) -> WindowTokens:
    """The window after the token in the slot `last` (None: in the last slot; -1: there was none), from inputs of
    `add_window`."""
    reach, size = rule.algorithm.window - 1, inputs.queries.shape[1]
    chunks = WindowTokens(inputs.keys, inputs.values, inputs.gates.step_size)
    if last is None:
        return latest(jax.tree.map(lambda x: x[-1], chunks), reach)

    def window(x: jax.Array, before: jax.Array) -> jax.Array:
        chunk = jax.lax.dynamic_index_in_dim(x, jnp.maximum(last, 0) // size, keepdims=False)
        found = jax.lax.dynamic_slice_in_dim(chunk, last % size + 1, reach)
        return jnp.where(last < 0, before, to_state_dtype(found))

    return jax.tree.map(window, chunks, state.window)
