"""The pieces every form shares: matmuls in the right precision, taps, the token loss, gates in their full shape."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from titans_jax.memory.platform import target_platform
from titans_jax.memory.types import Gates, MemoryRule, MemoryState, Surprise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed:
    """A fast matrix [in, out] kept as `array` [out, in]: where out is narrow, lanes are full only that way."""

    array: jax.Array

    @property
    def shape(self):
        return self.array.shape[::-1]

    def __mul__(self, scale):
        return Transposed(self.array * scale)

    def __add__(self, other):
        return Transposed(self.array + other.array)

    __rmul__ = __mul__


def matmul(x: jax.Array, y: jax.Array | Transposed, operand_dtype) -> jax.Array:
    """x @ y with operands in operand_dtype, accumulated and returned in float32 (float64 for float64)."""
    if isinstance(y, Transposed):
        return products(x, y.array, operand_dtype)
    x, y = x.astype(operand_dtype), y.astype(operand_dtype)
    return jnp.matmul(x, y, precision=precision(operand_dtype), preferred_element_type=state_dtype(operand_dtype))


def careful_matmul(x: jax.Array, y: jax.Array, operand_dtype) -> jax.Array:
    """`matmul`, for operands in bfloat16 by twice its digits: where errors of one product would be those of all."""
    if operand_dtype != jnp.bfloat16:
        return matmul(x, y, operand_dtype)
    (x, x_rest), (y, y_rest) = in_two(x), in_two(y)
    return sum(matmul(*part, operand_dtype) for part in ((x, y), (x, y_rest), (x_rest, y)))


def in_two(x):
    """x as the sum of two numbers of bfloat16."""
    most = x.astype(jnp.bfloat16)
    return most, (x - most.astype(x.dtype)).astype(jnp.bfloat16)


def products(x: jax.Array, y: jax.Array, operand_dtype) -> jax.Array:
    """x @ y.T, every row of x [t, n] with every row of y [i, n], as `matmul`."""
    return contract(x, y, 1, operand_dtype)


def outer(x: jax.Array, y: jax.Array, operand_dtype) -> jax.Array:
    """x.T @ y, the sum over tokens of x_t^T y_t: [t, in] and [t, out] -> [in, out], as `matmul`."""
    return contract(x, y, 0, operand_dtype)


def weighted_sums(rows, inner, deltas, operand_dtype, transposed=False):
    """Sums over tokens of row_i inner_i^T deltas_i, [in, out], one per row [1, tokens], by one product.

    The rows scale the narrower side: transposed, that is a product with as many rows, and the wider side is read once.
    """
    if inner.shape[1] > deltas.shape[1]:
        totals = weighted_sums(rows, deltas, inner, operand_dtype)
        return [Transposed(total) if transposed else total.T for total in totals]
    if len(rows) == 1 and target_platform() == "cpu":  # see `contract`
        return [outer(rows[0].T * inner, deltas, operand_dtype)]
    stacked = join([row * inner.T for row in rows], operand_dtype)
    return jnp.split(matmul(stacked, deltas, operand_dtype), len(rows))


def join(operands, operand_dtype, axis: int = 0) -> jax.Array:
    """Operands of a product side by side, each cast by itself: what another product takes too is cast once."""
    return jnp.concatenate([x.astype(operand_dtype) for x in operands], axis=axis)


def contract(x: jax.Array, y: jax.Array, axis: int, operand_dtype) -> jax.Array:
    """The sum over this axis of both, named to the compiler: a transpose of its own costs a kernel dearly."""
    x, y, dimensions = x.astype(operand_dtype), y.astype(operand_dtype), (((axis,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, y, dimensions, precision(operand_dtype), state_dtype(operand_dtype))


def widened(column, width: int):
    """A column [n, 1] as [n, width], on a CPU by a product; rows or numbers that need no widening as they are.

    Its gradient is then a product too, not a sum of elementwise products, at which XLA on a CPU is ten times slower.
    """
    if jnp.ndim(column) == 0 or column.shape[1] == width:
        return column
    if target_platform() != "cpu":
        return jnp.broadcast_to(column, (len(column), width))
    return matmul(column, jnp.ones((1, width), column.dtype), column.dtype)


def precision(operand_dtype) -> jax.lax.Precision:
    """One pass for bfloat16 operands, all digits for wider ones."""
    return jax.lax.Precision.DEFAULT if operand_dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST


def state_dtype(dtype) -> jnp.dtype:
    """The dtype of memory states: float64 for float64 inputs, float32 for everything else."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def read(rule: MemoryRule, params, weights, queries: jax.Array) -> jax.Array:
    """M(queries) at the given weights, in the state's dtype; queries [..., head_dim] also give the operand dtype."""

    def linears(parts):
        return [lambda i, x, cut=cut: matmul(x, cut[i], queries.dtype) for cut in columns(weights, parts)]

    return rule.algorithm.read(rule.architecture, linears, params, widen(queries))


def columns(matrices, parts: int):
    """`parts` tuples of matrices, each with its share of the columns of every one."""
    return [matrices] if parts == 1 else zip(*(jnp.split(matrix, parts, axis=1) for matrix in matrices), strict=True)


def readable(rule: MemoryRule, params, state: MemoryState) -> tuple[jax.Array, ...]:
    """The fast weights that a read at this state sees: those of the chunk's start, moved along (see `retentions`)."""
    if rule.retention.linear:
        return state.weights
    opened = rule.retention.weights(state.anchor, params)
    slopes = rule.retention.slope(state.anchor, params)
    parts = zip(opened, slopes, state.weights, state.anchor, strict=True)
    return tuple(w + slope * (carried - anchor) for w, slope, carried, anchor in parts)


def close(rule: MemoryRule, params, start: MemoryState, carried, reads, queries, mask):
    """What a chunk passes on and its reads, of the linear end state: if its last slot holds a token, the chunk is over,
    and that token reads what `Retention.close` makes of it."""
    over = True if mask is None else mask[-1:]
    closed = rule.retention.close(carried, start.anchor, params)
    last = read(rule, params, rule.retention.weights(closed, params), queries[-1:])
    carried = tuple(jnp.where(over, new, old) for new, old in zip(closed, carried, strict=True))
    return carried, jnp.concatenate([reads[:-1], jnp.where(over, last, reads[-1:])])


def widen(x: jax.Array) -> jax.Array:
    return x.astype(state_dtype(x.dtype))


def taps(rule: MemoryRule, params, anchor, keys, values, gates: Gates):
    """Every token's rank-one gradient at the anchor, x_i^T delta_i per fast matrix, and its surprise (design 3.1).

    Zero taps are added to the output of each fast matrix; the gradient of the summed bias with respect to them is every
    token's output cotangent delta_i [tokens, out_i] at once, and the inputs x_i [tokens, in_i] are recorded on the way.
    Channel-wise step sizes of `gates` are in x_0 and in the last delta.
    """
    values = widen(values)
    tokens = keys.shape[:-1]
    zeros = tuple(jnp.zeros((*tokens, w.shape[-1]), values.dtype) for w in anchor)

    def loss(tap, read_tap):
        inputs = [None] * len(anchor)

        def linear(i, x):
            inputs[i] = x
            return matmul(x, anchor[i], keys.dtype) + tap[i]

        losses = inner_loss(rule, linear, params, keys, values, gates.bias_gate, read_tap)
        return jnp.sum(losses), (tuple(inputs), losses)

    grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
    (deltas, cotangent), (inputs, losses) = grad(zeros, jnp.zeros(values.shape, values.dtype))
    # A measurement, not a path for gradients: the norm has none at 0, which is where a learned token stands.
    losses, cotangent = jax.lax.stop_gradient((losses, cotangent))
    if gates.key_step_size is not None:
        inputs = (inputs[0] * gates.key_step_size, *inputs[1:])
    if gates.value_step_size is not None:
        deltas = (*deltas[:-1], deltas[-1] * gates.value_step_size)
    return inputs, deltas, Surprise(losses, jnp.linalg.norm(cotangent, axis=-1))


def inner_loss(rule: MemoryRule, linear, params, keys, values, bias_gate, tap):
    """The losses [...] whose gradients are written, with `tap` added to the read that is judged."""
    return rule.algorithm.inner_loss(rule.architecture, rule.bias, linear, params, widen(keys), values, bias_gate, tap)


def retention_of(gate: Gates, i: int, matrices: int) -> jax.Array:
    """One token's retention of matrix i, [1 or in, 1 or out]; gate leaves are of one token."""
    kept = jnp.exp(gate.log_retention[i])[None, None]
    if i == 0 and gate.log_key_retention is not None:
        kept = kept * jnp.exp(gate.log_key_retention)[:, None]
    if i == matrices - 1 and gate.log_value_retention is not None:
        kept = kept * jnp.exp(gate.log_value_retention)[None, :]
    return kept


def one_token(gate: Gates) -> Gates:
    """A token's own gates with the time axis that `taps` expects."""
    return jax.tree.map(lambda x: x[None], gate)


def judged(rule: MemoryRule, anchor, gate: Gates):
    """The matrices at which a token's gradient is taken: the anchor, or what its own retention leaves of it."""
    if not rule.algorithm.decay_first:
        return anchor
    return tuple(retention_of(gate, i, len(anchor)) * w for i, w in enumerate(anchor))


def complete_gates(rule: MemoryRule, gates: Gates, keys: jax.Array, matrices: int, dtype) -> Gates:
    """Gates in the state's dtype: scalars [time, matrices], momentum only where the algorithm has it, the bias's own
    [time, 1 or head_dim], and the algorithm's step size."""

    def full(x, width):
        if x is None:
            return None
        x = x.astype(dtype)[:, None] if x.ndim == 1 else x.astype(dtype)
        return jnp.broadcast_to(x, (x.shape[0], max(width, x.shape[1])))

    step_size = rule.algorithm.step_size(full(gates.step_size, matrices), widen(keys))
    cast = {
        name: full(getattr(gates, name), 1)
        for name in ("bias_gate", "log_key_retention", "log_value_retention", "key_step_size", "value_step_size")
    }
    momentum = full(gates.log_momentum, matrices) if rule.algorithm.has_momentum else None
    return Gates(full(gates.log_retention, matrices), momentum, step_size, gates.mask, **cast)


def inner_steps(steps: int, queries, keys, values, gates: Gates, resets):
    """Tokens of several inner steps as a longer sequence of single steps; the last of a token's is its read."""

    def flat(x):
        return None if x is None else x.reshape(-1, *x.shape[2:])

    def every(x):
        return None if x is None else jnp.repeat(x, steps, axis=0)

    def first(x):  # acts once, with the token's first step
        if x is None:
            return None
        rest = jnp.zeros((x.shape[0], steps - 1, *x.shape[1:]), x.dtype)
        return flat(jnp.concatenate([x[:, None], rest], axis=1))

    gates = Gates(
        first(gates.log_retention),
        None,
        flat(gates.step_size),
        every(gates.mask),
        flat(gates.bias_gate),
        first(gates.log_key_retention),
        first(gates.log_value_retention),
        flat(gates.key_step_size),
        flat(gates.value_step_size),
    )
    return every(queries), flat(keys), flat(values), gates, first(resets)


def select_state(condition, when_true: MemoryState, when_false: MemoryState) -> MemoryState:
    """Elementwise choice between two states."""
    choose = functools.partial(jnp.where, condition)
    return jax.tree.map(lambda a, b: choose(jnp.asarray(a), jnp.asarray(b)), when_true, when_false)


def cast_state(state: MemoryState, dtype) -> MemoryState:
    """The state with its matrices in `dtype`; its position as it is."""
    cast = lambda matrices: tuple(m.astype(dtype) for m in matrices)  # noqa: E731
    return MemoryState(cast(state.weights), cast(state.momentum), cast(state.anchor), state.position)
