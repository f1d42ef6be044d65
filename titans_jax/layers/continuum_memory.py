"""Continuum memory: MLPs whose weights change while they read, each at its own frequency (Nested Learning, arXiv
2512.24695); it stands where other blocks have a feed-forward layer.

    z_0 = x ,  z_l = MLP_l(norm_l(z_{l-1})) ,  y = scale * z_L          "sequential"
    y = scale * sum_l a_l MLP_l(norm_l(x))                              "independent", a learned

    MLP_l(u) = gelu(u W_0) W_1 ,  W = M_0 + D as of the start of every C_l tokens, M_0 learned, D = 0 at first, and
    D <- (1 - alpha_t) D - theta_t grad 1/2 ||MLP_l(u_t) - v_t||^2 / C_l    with every token

(with `forget_to` "zero", W in place of D, from M_0 on; with `forget` "never", alpha_t is 0).
A token reads, and its gradient is taken at, the weights of its window's start, so it sees no update that depends on a
later token. v = x W_v is the target of all levels: the paper descends the outer loss, which a layer does not know while
it reads. The equations are from secondary notes; memory/later_models.md, Hope has what they leave open.

Shapes: b batch, t time, c tokens of a window.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from titans_jax import memory
from titans_jax.config import ModelConfig
from titans_jax.layers.document_layout import Documents, aligned
from titans_jax.layers.feed_forward import hidden_width
from titans_jax.layers.head_reads import MemoryLayer
from titans_jax.layers.memory_gates import head_logits
from titans_jax.layers.neural_memory import broadcast
from titans_jax.layers.norms import RMSNorm
from titans_jax.layers.projections import INIT_STDDEV, compute_dtype, param_dtype, projection
from titans_jax.layers.scan_chunks import at, scan_chunks
from titans_jax.layers.segments import flags_like
from titans_jax.memory.rule.architectures import Apply, Architecture, Params, Shapes, gelu
from titans_jax.memory.rule.gate_choices import OPEN_BIAS, forget
from titans_jax.sharding import logical

GELU_SQUARE, SLOPE_SQUARE = 0.425, 0.456
"""Means of gelu(n)^2 and of its slope's square, n normal."""


@dataclasses.dataclass(frozen=True)
class Level(Architecture):
    """M(x) = gelu(x W_0) W_1 of any width inside, no residual: one MLP of a continuum memory."""

    hidden: int

    def shapes(self, head_dim: int) -> Shapes:
        return ((head_dim, self.hidden), (self.hidden, head_dim))

    def read(self, linear: Apply, params: Params, x: jax.Array) -> jax.Array:
        return linear(1, gelu(linear(0, x)))


class WindowInputs(NamedTuple):
    """Inputs of a level: inputs and values [b, t, dim], log_retention and step_size [b, t]; of packed documents the
    mask and their first tokens, bool [b, t]."""

    inputs: jax.Array
    values: jax.Array
    log_retention: jax.Array
    step_size: jax.Array
    mask: jax.Array | None
    begins: jax.Array | None


class ContinuumMemory(MemoryLayer):
    """A chain of MLPs that change after every C_1, C_2, .. tokens, [b, t, dim] -> [b, t, dim].

    Its state is one `MemoryState` [b, ...] of every level.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        chunks, self.dim, self.dtype = config.memory.continuum_chunks, config.dim, compute_dtype(config)
        self.independent = config.memory.continuum_order == "independent"
        hidden, dtype = level_width(config), param_dtype(config)
        to_start = config.memory.forget_to == "start"
        self.rules = tuple(level_rule(hidden, size, to_start) for size in chunks)
        self.forgets, self.unit = config.memory.forget != "never", error_removed(config.dim, hidden)

        def level(key: jax.Array) -> list[nnx.Param]:
            weights = memory.init_params(self.rules[0], key, config.dim)["weights"]
            axes = ("embed", "mlp"), ("mlp", "embed")
            each = zip(weights, axes, strict=True)
            return [nnx.Param(logical(lambda w=w: w.astype(dtype), *names)()) for w, names in each]

        self.start_weights = nnx.List([nnx.List(level(rngs.params())) for _ in chunks])
        self.norms = nnx.List([RMSNorm(config, config.dim, rngs=rngs) for _ in chunks])
        self.value = projection(config, config.dim, config.dim, ("embed", None), rngs=rngs)
        kernel = logical(initializers.truncated_normal(0.1), None, None, None)
        self.gate_kernel = nnx.Param(kernel(rngs.params(), (config.dim, len(chunks), 2), dtype))
        bias = jnp.broadcast_to(jnp.array([[0.0, OPEN_BIAS]], dtype), (len(chunks), 2))
        self.gate_bias = nnx.Param(logical(lambda: bias, None, None)())
        # As much as a feed-forward layer of this width and two matrices adds at first: an input of size s * sqrt(dim)
        # leaves a gelu half as large, s being the deviation of its start.
        size = INIT_STDDEV * (hidden / (2 * config.depth)) ** 0.5 * INIT_STDDEV * config.dim**0.5 / 2
        self.scale = nnx.Param(logical(initializers.constant(size), "embed")(rngs.params(), (config.dim,), dtype))
        if self.independent:
            shares = logical(initializers.constant(1 / len(chunks)), None)
            self.shares = nnx.Param(shares(rngs.params(), (len(chunks),), dtype))

    def __call__(
        self, x: jax.Array, state: tuple[memory.MemoryState, ...] | None = None, documents: Documents | None = None
    ) -> tuple[jax.Array, tuple[memory.MemoryState, ...]]:
        """Read x [b, t, dim]: y [b, t, dim] and the state after it. Documents must be aligned to the largest window
        (else y of the row is NaN); after them the state is for inspection: reading cannot go on from it."""
        if state is None:
            state = broadcast(self.start(), x.shape[0])
        values, logits = self.value(x), head_logits(self.gate_kernel[...], self.gate_bias[...], x)
        z, answers, after = x, [], []
        for number, carried in enumerate(state):
            inputs = self.norms[number](x if self.independent else z)
            z, carried = self._level(number, inputs, values, logits[:, :, number], carried, documents)
            after.append(carried)
            answers.append(z)
        if self.independent:
            z = sum(share * answer for share, answer in zip(self.shares[...].astype(x.dtype), answers, strict=True))
        if documents is not None:
            z = jnp.where(aligned(documents, self.rules[-1].chunk_size)[:, None, None], z, jnp.nan)
        return z * self.scale[...].astype(x.dtype)[None, None], tuple(after)

    def start(self) -> tuple[memory.MemoryState, ...]:
        """The state before a document's first token, without the batch axis."""
        levels = enumerate(self.rules)
        return tuple(at(memory.init_state(rule, self.params(number)), 0) for number, rule in levels)

    def init_state(self, batch: int) -> tuple[memory.MemoryState, ...]:
        """`start` for every row of a batch, as arrays only: the state that streaming starts with."""
        return tuple(at(state, jnp.zeros((), jnp.int32)) for state in broadcast(self.start(), batch))

    def params(self, number: int) -> memory.Params:
        """The slow parameters of a level."""
        return {"weights": tuple(weight[...] for weight in self.start_weights[number])}

    def _level(
        self,
        number: int,
        inputs: jax.Array,
        values: jax.Array,
        logits: jax.Array,
        state: memory.MemoryState,
        documents: Documents | None,
    ) -> tuple[jax.Array, memory.MemoryState]:
        """Answers [b, t, dim] of a level, and its state; logits [b, t, 2] of step size and forgetting."""
        rule, params = self.rules[number], broadcast(self.params(number), len(inputs))
        if not self.writes:
            return self._retrieve(rule, params, state.weights, inputs), state
        size = rule.chunk_size
        # A token forgets as much in every level. Were forgetting spread over the window like steps, a level of 256
        # would keep its content for 38,000 tokens, which no training row shows, and read long texts worse than from an
        # emptied state.
        kept = forget(logits[..., 1]) if self.forgets else jnp.zeros_like(logits[..., 1])
        step_size = jax.nn.sigmoid(logits[..., 0]) / (self.unit * size)
        packed = (None, None) if documents is None else (documents.mask, documents.starts)
        first = broadcast(self.start()[number].weights, len(inputs))  # as params, whose gradients are summed at the end
        step = functools.partial(self._window, rule, params, first)
        window = WindowInputs(inputs, values, kept, step_size, *packed)
        state, _, answers = scan_chunks(step, size, state, None, window)
        return answers, state

    def _window(
        self,
        rule: memory.MemoryRule,
        params: memory.Params,
        first: tuple[jax.Array, ...],
        state: memory.MemoryState,
        extra: None,
        window: WindowInputs,
        valid: jax.Array | None,
    ) -> tuple[memory.MemoryState, None, jax.Array]:
        """Tokens of one window; first: the weights that documents start with, [b, ...]."""
        mask, position = window.mask, state.position
        if window.begins is not None:  # documents are read from a window's start on
            fresh = lambda new, old: jnp.where(flags_like(window.begins[:, 0], old), new, old)  # noqa: E731
            weights = jax.tree.map(fresh, first, state.weights)
            state = memory.MemoryState(weights, (), weights, position)
        if valid is not None:
            mask = jnp.broadcast_to(valid[None], window.inputs.shape[:2])
        answers = self._retrieve(rule, params, state.anchor, window.inputs)
        form = "recurrent" if len(window.inputs[0]) == 1 else "chunked"

        def one(position: Any, params: memory.Params, state: memory.MemoryState, keys, values, gates) -> Any:
            _, after = memory.memorize(rule, params, at(state, position), keys, keys, values, gates, form)
            return at(after, None)

        gates = memory.Gates(window.log_retention, None, window.step_size, mask)
        rows = jax.vmap(one, in_axes=(None, 0, 0, 0, 0, 0))
        after = rows(position, params, at(state, None), window.inputs, window.values, gates)
        return at(after, position), None, answers

    def _retrieve(
        self, rule: memory.MemoryRule, params: memory.Params, carried: tuple[jax.Array, ...], inputs: jax.Array
    ) -> jax.Array:
        """Inputs [b, c, dim] read at weights [b, ...]."""

        def one(params: memory.Params, carried: tuple[jax.Array, ...], inputs: jax.Array) -> jax.Array:
            return memory.retrieve(rule, params, memory.MemoryState(carried, (), carried, 0), inputs)

        return jax.vmap(one)(params, carried, inputs).astype(self.dtype)


def level_width(config: ModelConfig) -> int:
    """Width inside the MLP of every level, all of which together have a SwiGLU's parameters."""
    return max(1, 3 * hidden_width(config) // (2 * len(config.memory.continuum_chunks)))


def level_rule(hidden: int, chunk_size: int, to_start: bool) -> memory.MemoryRule:
    """The rule of a level: plain descent of the L2 loss."""
    descent, keep = memory.algorithms.gradient_descent(), memory.retentions.decay()
    choices = {"forget_to_start": to_start, "orthogonal_start": False}  # `error_removed` is of independent entries
    return memory.MemoryRule(Level(hidden), memory.biases.l2(), keep, descent, chunk_size, **choices)


def error_removed(dim: int, hidden: int) -> float:
    """The share of its error that a step of 1 removes from a fresh level, whose inputs have a mean square of 1
    (derived)."""
    return hidden * GELU_SQUARE + dim * SLOPE_SQUARE
