"""The neural memory as a layer: projections in front, one memory per head, norm and gate behind (papers.md 1.5).

    q, k, v = silu(conv(x W))          each its own projection and convolution; q and k to unit norm per head
    alpha, eta, theta = gates(x)       per token, head and fast matrix
    r = memory(q, k, v, gates)         titans_jax.memory, a batch and heads of it
    y = (rms_norm(r) * silu(x W_g)) W_o

Shapes: b batch, t time, h heads, d head_dim, m fast matrices of one memory.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from titans_jax import memory
from titans_jax.config import MemoryConfig, ModelConfig
from titans_jax.layers.convolution import CausalConvolution
from titans_jax.layers.documents import Documents
from titans_jax.layers.linear import compute_dtype, param_dtype, projection
from titans_jax.layers.norms import RMSNorm, l2_normalize
from titans_jax.sharding import BATCH, constrain, logical

FORGET_BIAS = -8.0
MOMENTUM_BIAS = 0.0
STEP_SIZE_BIAS = 0.0


class MemoryLayerState(NamedTuple):
    """What the layer carries: the memory of every head [b, h, ...], and the last inputs of the q, k, v convolutions."""

    memory: memory.MemoryState
    tails: tuple[jax.Array, jax.Array, jax.Array]


def memory_rule(config: MemoryConfig) -> memory.MemoryRule:
    """The rule that a configuration describes (Titans: L2 bias, decay, momentum)."""
    architecture = {
        "linear": lambda: memory.architectures.linear(),
        "mlp": lambda: memory.architectures.mlp(config.depth, config.expansion),
        "residual_mlp": lambda: memory.architectures.residual_mlp(config.depth, config.expansion),
        "gated_mlp": lambda: memory.architectures.gated_mlp(config.expansion),
    }[config.architecture]()
    algorithm = memory.algorithms.momentum() if config.momentum else memory.algorithms.gradient_descent()
    return memory.MemoryRule(
        architecture=architecture,
        bias=memory.biases.l2(),
        retention=memory.retentions.decay(),
        algorithm=algorithm,
        chunk_size=config.chunk_size,
    )


class MemoryInput(nnx.Module):
    """x [b, t, dim] -> queries, keys or values [b, t, h, d]: projection, causal convolution, SiLU, unit norm."""

    def __init__(self, config: ModelConfig, *, unit_norm: bool, rngs: nnx.Rngs):
        width = config.num_heads * config.head_dim
        self.heads = (config.num_heads, config.head_dim)
        self.activation, self.unit_norm = config.memory.activation, unit_norm
        self.projection = projection(config, config.dim, width, ("embed", "heads"), rngs=rngs)
        self.convolution = CausalConvolution(config, width, rngs=rngs)

    def __call__(self, x, tail, documents: Documents | None = None, initial_tail=None) -> tuple[jax.Array, jax.Array]:
        """Also returns the convolution's next tail; see `CausalConvolution`."""
        x = constrain(self.projection(x), BATCH, None, "tensor")
        x, tail = self.convolution(x, tail, documents, initial_tail)
        x = jax.nn.silu(x) if self.activation else x
        x = x.reshape(*x.shape[:-1], *self.heads)
        return (l2_normalize(x) if self.unit_norm else x), tail


class MemoryGates(nnx.Module):
    """alpha, eta, theta of every token, head and fast matrix, from the block's input (papers.md 1.3, 1.11 c-f).

    alpha = sigmoid(. - 8), so a memory starts by keeping all but 3e-4 per token: behind a norm, forgetting only shrinks
    the weights, and every gradient grows with it, until training explodes (papers.md 1.3 suggests -4, which is a factor
    of 50 in 220 tokens). The gates learn to forget. eta = sigmoid(.), so past surprise starts with a half-life of one
    token; theta = max_step_size / head_dim * sigmoid(.). In float32, from x / sqrt(dim): Adam moves all entries
    of a kernel alike, and would turn a plain product with x so fast that gates saturate before the model has learned.
    """

    def __init__(self, config: ModelConfig, matrices: int, *, rngs: nnx.Rngs):
        biases = [FORGET_BIAS, STEP_SIZE_BIAS] + [MOMENTUM_BIAS] * config.memory.momentum
        dtype, shape = param_dtype(config), (len(biases), config.num_heads, matrices)
        # Small: at first every token has nearly the same gates.
        kernel = logical(initializers.truncated_normal(0.1), None, None, "heads", None)
        start = jnp.broadcast_to(jnp.array(biases, dtype)[:, None, None], shape)
        bias = logical(lambda: start, None, "heads", None)
        self.kernel = nnx.Param(kernel(rngs.params(), (config.dim, *shape), dtype))
        self.bias = nnx.Param(bias())
        self.max_step_size = config.memory.max_step_size / config.head_dim

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> memory.Gates:
        """x [b, t, dim], mask bool [b, t] -> gates [b, t, h, m], mask [b, t]."""
        kernel = self.kernel[...]
        x = x.astype(kernel.dtype) * x.shape[-1] ** -0.5
        logits = jnp.einsum("btd,dghm->gbthm", x, kernel) + self.bias[...][:, None, None]
        return memory.Gates(
            log_retention=jax.nn.log_sigmoid(-logits[0]),
            step_size=self.max_step_size * jax.nn.sigmoid(logits[1]),
            log_momentum=jax.nn.log_sigmoid(logits[2]) if logits.shape[0] == 3 else None,
            mask=mask,
        )


class NeuralMemory(nnx.Module):
    """A sequence layer that learns while it reads, [b, t, dim] -> [b, t, dim].

    One independent memory per head, whose start M_0 is a learned parameter per head (papers.md 1.11-k).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.rule, self.form = memory_rule(config.memory), config.memory.form
        self.num_heads, self.dtype = config.num_heads, compute_dtype(config)
        width = config.num_heads * config.head_dim
        self.query = MemoryInput(config, unit_norm=True, rngs=rngs)
        self.key = MemoryInput(config, unit_norm=True, rngs=rngs)
        self.value = MemoryInput(config, unit_norm=False, rngs=rngs)

        keys = jax.random.split(rngs.params(), config.num_heads)
        start = jax.vmap(lambda key: memory.init_params(self.rule, key, config.head_dim))(keys)

        def parameter(value: jax.Array) -> nnx.Param:
            axes = ("heads",) + (None,) * (value.ndim - 1)
            return nnx.Param(logical(lambda: value.astype(param_dtype(config)), *axes)())

        self.start_weights = nnx.List([parameter(weight) for weight in start.pop("weights")])
        self.slow = nnx.Dict({name: parameter(value) for name, value in start.items()})

        self.gates = MemoryGates(config, len(self.start_weights), rngs=rngs)
        self.norm = RMSNorm(config, config.num_heads, config.head_dim, axes=("heads", None), rngs=rngs)
        self.output_gate = projection(config, config.dim, width, ("embed", "heads"), rngs=rngs)
        self.output_projection = projection(
            config, width, config.dim, ("heads", "embed"), writes_residual=True, rngs=rngs
        )

    def __call__(
        self,
        x: jax.Array,
        state: MemoryLayerState | None = None,
        documents: Documents | None = None,
        persistent: jax.Array | None = None,
    ) -> tuple[jax.Array, MemoryLayerState, dict[str, jax.Array]]:
        """Write every token of x [b, t, dim], and read it back at the memory it left.

        Args:
          state: of the tokens before; None is the start of a sequence.
          documents: packed documents, aligned to `chunk_size`; each begins with the memory of the sequence's start.
          persistent: [n, dim], read before the first token of a sequence and of every document.

        Returns:
          y [b, t, dim], the state after x, and a report (see `memorize`).
        """
        start = None
        if state is None or documents is not None:
            start = self.start(persistent)
        if state is None:
            state = broadcast(start, x.shape[0])
        reads, state, report = self.memorize(x, state, documents, start)
        return self.output(x, reads), state, report

    def memorize(
        self,
        x: jax.Array,
        state: MemoryLayerState,
        documents: Documents | None = None,
        start: MemoryLayerState | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[jax.Array, MemoryLayerState, dict[str, jax.Array]]:
        """Write x [b, t, dim]; the raw reads [b, t, h, d], the next state, and what to watch.

        The report holds retention, momentum, step_size (means over heads and matrices) and inner_loss (mean over
        heads), each [b, t], and weight_norm [b], the mean Frobenius norm of a head's weights at the end.
        """
        features, tails = [], []
        initial_tails = (None,) * 3 if start is None else start.tails
        inputs = (self.query, self.key, self.value)
        for module, tail, initial_tail in zip(inputs, state.tails, initial_tails, strict=True):
            feature, tail = module(x, tail, documents, initial_tail)
            features.append(feature)
            tails.append(tail)
        resets = None
        if documents is not None:
            mask, resets = documents.mask, documents.starts
        gates = self.gates(x, mask)
        reads, after, surprise = self._memorize(
            state.memory, *features, gates, resets, None if start is None else start.memory
        )
        return reads, MemoryLayerState(after, tuple(tails)), _report(gates, surprise, after)

    def retrieve(self, weights: tuple[jax.Array, ...], queries: jax.Array) -> jax.Array:
        """Read weights [b, h, ...] with queries [b, t, h, d] and change nothing: [b, t, h, d]."""

        def one(params, weights, queries):
            state = memory.MemoryState(weights=weights, momentum=(), anchor=weights, position=0)
            return memory.retrieve(self.rule, params, state, queries)

        heads = jax.vmap(one, in_axes=(0, 0, 1), out_axes=1)
        return jax.vmap(heads, in_axes=(None, 0, 0))(self.params(), weights, queries)

    def output(self, x: jax.Array, reads: jax.Array) -> jax.Array:
        """Reads [b, t, h, d] to model width: RMSNorm per head, gate silu(x W_g) (Gated DeltaNet), output projection."""
        y = self.norm(reads.astype(self.dtype)).reshape(*reads.shape[:-2], -1)
        return self.output_projection(y * jax.nn.silu(self.output_gate(x)))

    def start(self, persistent: jax.Array | None = None) -> MemoryLayerState:
        """The state before a document's first token, without the batch axis: M_0 with no momentum and no history, or
        what that is after reading persistent tokens [n, dim].

        The chunk grid begins anew after the persistent tokens, so that a document begins on it whatever n is.
        """
        params = self.params()
        first = jax.vmap(lambda params: memory.init_state(self.rule, params))(params)
        history = (self.query.convolution.size - 1, self.query.projection.out_features)
        state = MemoryLayerState(_replace(first, position=0), (jnp.zeros(history, self.dtype),) * 3)
        if persistent is None:
            return state
        _, state, _ = self.memorize(persistent[None], broadcast(state, 1))
        (weights, momentum), tails = jax.tree.map(
            lambda leaf: leaf[0], ((state.memory.weights, state.memory.momentum), state.tails)
        )
        return MemoryLayerState(memory.MemoryState(weights, momentum, anchor=weights, position=0), tails)

    def init_state(self, batch: int, persistent: jax.Array | None = None) -> MemoryLayerState:
        """`start` for every row of a batch, as arrays only: the state that streaming begins with."""
        state = broadcast(self.start(persistent), batch)
        return state._replace(memory=_replace(state.memory, position=jnp.zeros((), jnp.int32)))

    def params(self) -> memory.Params:
        """The memory's slow parameters, with a leading heads axis."""
        slow = {name: value[...] for name, value in self.slow.items()}
        return {"weights": tuple(weight[...] for weight in self.start_weights), **slow}

    def _memorize(self, state, queries, keys, values, gates, resets, start):
        """`memory.memorize` for a batch of heads. Position is shared by all of them, so it travels beside the vmap."""
        time, position = queries.shape[1], state.position
        form = "recurrent" if time == 1 else self.form

        def one(params, state, queries, keys, values, gates, resets, start):
            reads, state, surprise = memory.memorize(
                self.rule,
                params,
                _replace(state, position=position),
                queries,
                keys,
                values,
                gates,
                form,
                resets=resets,
                initial_state=None if start is None else _replace(start, position=0),
                return_surprise=True,
            )
            return reads, _replace(state, position=None), surprise

        gate_axes = memory.Gates(log_retention=1, log_momentum=1, step_size=1, mask=None)
        heads = jax.vmap(one, in_axes=(0, 0, 1, 1, 1, gate_axes, None, 0), out_axes=(1, 0, 1))
        rows = jax.vmap(heads, in_axes=(None, 0, 0, 0, 0, 0, 0, None))
        reads, after, surprise = rows(
            self.params(),
            _replace(state, position=None),
            queries,
            keys,
            values,
            gates,
            resets,
            None if start is None else _replace(start, position=None),
        )
        # Documents begin on the chunk grid, so the open chunk is as long in every row.
        return reads, _replace(after, position=(position + time) % self.rule.chunk_size), surprise


def broadcast(state: Any, batch: int) -> Any:
    """A state without batch axis for every row of a batch; a position, one number for all rows, stays as it is."""
    return jax.tree.map(lambda x: x if isinstance(x, int) else jnp.broadcast_to(x, (batch, *x.shape)), state)


def _replace(state: memory.MemoryState, position) -> memory.MemoryState:
    return dataclasses.replace(state, position=position)


def _report(gates: memory.Gates, surprise: memory.Surprise, state: memory.MemoryState) -> dict[str, jax.Array]:
    report = {"retention": jnp.exp(gates.log_retention), "step_size": gates.step_size}
    if gates.log_momentum is not None:
        report["momentum"] = jnp.exp(gates.log_momentum)
    report = {name: jnp.mean(value, axis=(2, 3)) for name, value in report.items()}
    report["inner_loss"] = jnp.mean(surprise.loss, axis=2)
    squares = sum(jnp.sum(jnp.square(weight), axis=(2, 3)) for weight in state.weights)
    return report | {"weight_norm": jnp.mean(jnp.sqrt(squares), axis=1)}
