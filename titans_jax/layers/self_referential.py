"""Self-referential Titans: memories that make one another's keys, values and gates (Nested Learning, arXiv 2512.24695).

    x' = unit(silu(conv(x)))                   cut into heads: what the memories read
    q = unit(silu(conv(x W_q)))                the only projection
    k = unit(M_key(x')) ,  v = unit(M_value(x'))
    theta, 1 - a = gates of M_step_size(x'), M_retention(x')
    y_t = M_memory,t(q_t)
    M_i <- (a I - theta k^T k) M_i - theta grad 1/2 ||M_i(k) - M_i(v)||^2         for all five memories M_i
    out = (rms_norm(y) * silu(x W_g)) W_o      as every memory layer here

M_i(x') and M_i(v) read M_i as it was at the chunk's start; y_t reads the memory after token t's own write. The
equations are from secondary notes, not checked against the paper; what they leave open is in memory/later_models.md,
Hope.

Shapes: b batch, t time, c tokens of a chunk, h heads, d head_dim, n = 5 memories.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from titans_jax import memory
from titans_jax.config import ConfigError, ModelConfig, gate_choices, memory_rule, step_size_bound
from titans_jax.layers.convolution import CausalConvolution
from titans_jax.layers.document_layout import Documents, aligned
from titans_jax.layers.head_reads import HeadReads
from titans_jax.layers.memory_gates import error_share
from titans_jax.layers.memory_input import MemoryInput, start_halves_as_induction
from titans_jax.layers.memory_report import memory_report
from titans_jax.layers.neural_memory import broadcast, check_other_layers
from titans_jax.layers.norms import l2_normalize
from titans_jax.layers.projections import compute_dtype, param_dtype
from titans_jax.layers.scan_chunks import at, scan_chunks
from titans_jax.layers.segments import flags_like
from titans_jax.layers.shared_steps import StepTail, init_tail, joined, shared_steps
from titans_jax.memory.rule.gate_choices import LearnedGate, starts_of_heads
from titans_jax.ops.matmul import wide_dtype
from titans_jax.sharding import BATCH, constrain, logical

MEMORIES = ("key", "value", "step_size", "retention", "memory")
"""What is made by each memory, in the order in which they are stacked."""


class SelfReferentialState(NamedTuple):
    """What the layer carries: its memories [b, n, h, ...], and by name the last inputs of its convolutions and, where
    steps are shared, as "steps" the last keys with their steps."""

    memories: memory.MemoryState
    tails: dict[str, jax.Array | StepTail]


class ChunkInputs(NamedTuple):
    """Inputs that do not depend on the memories: x' and q [b, t, h, d]; of packed documents the mask, and where they
    begin, bool [b, t]."""

    tokens: jax.Array
    queries: jax.Array
    mask: jax.Array | None
    begins: jax.Array | None


class ChunkOutputs(NamedTuple):
    """Reads and M_memory(v) [b, t, h, d], gates and surprise of M_memory [b, t, h]."""

    reads: jax.Array
    values: jax.Array
    log_retention: jax.Array
    step_size: jax.Array
    surprise: memory.Surprise


def check_rule(config: ModelConfig) -> None:
    """Refuse memories that cannot make one another's inputs.

    Raises:
      ConfigError: the rule needs more of a token than a key, a value, a step size and a retention, or the memories
        would be kept, in shards or in levels.
    """
    rule, choices = memory_rule(config.memory), gate_choices(config.memory)
    plain = rule.learned_start and rule.algorithm.steps == rule.algorithm.window == 1
    plain = plain and not rule.algorithm.has_momentum and not rule.bias.takes_gate and not rule.retention.lags
    gates = (choices.retention_gate, choices.step_size_gate)
    alone = all(isinstance(gate, LearnedGate) for gate in gates) and choices.bounded
    by_channel = choices.channel_logits(rule) or choices.keys != "projected" or choices.preconditioned
    check_other_layers(config, "hope", "its memories make one another's inputs")
    for name in ("tie_keys", "value_skip", "skip_projection", "prediction_gate", "normalize_values"):
        if getattr(config.memory, name):
            raise ConfigError(f"model.memory.{name} is True, which hope does not do; use None")
    if not plain or not alone or by_channel or choices.corrected_queries:
        raise ConfigError(
            f"model.memory.preset is {config.memory.preset}, whose memories need more than a key, a value, a step size "
            "and a retention of their own; a block whose memories make these takes hope or ttt_mlp, without momentum "
            "and channel-wise gates"
        )


class SelfReferentialMemory(HeadReads):
    """A sequence layer whose memories make one another's keys, values and gates, [b, t, dim] -> [b, t, dim].

    Five memories in every head, each with a learned start. They are read and written chunk by chunk, in the chunked
    form (or the configuration's recurrent or associative one); no kernel runs them.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        check_rule(config)
        self.config, self.rule = config, memory_rule(config.memory)
        self.form = config.memory.form if config.memory.form in ("recurrent", "associative") else "chunked"
        self.num_heads, self.head_dim, self.dtype = config.num_heads, config.head_dim, compute_dtype(config)
        dtype, heads = param_dtype(config), (config.num_heads, config.head_dim)
        self.query = MemoryInput(config, unit_norm=True, rngs=rngs)
        self.convolution = CausalConvolution(config, config.dim, rngs=rngs)
        induction = config.memory.key_start == "induction" and config.conv_size > 1
        chosen = start_halves_as_induction(self.query, self.convolution) if induction else 0

        shape = (len(MEMORIES), config.num_heads)
        keys = jax.random.split(rngs.params(), shape)
        start = jax.vmap(jax.vmap(lambda key: memory.init_params(self.rule, key, config.head_dim)))(keys)
        if chosen and "norm_scale" in start:  # keys that are half the token's own, not random functions of it
            of_keys = start["norm_scale"].at[MEMORIES.index("key"), :chosen]
            start["norm_scale"] = of_keys.multiply(config.head_dim**-0.5)

        def parameter(value: jax.Array) -> nnx.Param:
            axes = (None, "heads") + (None,) * (value.ndim - 2)
            return nnx.Param(logical(lambda: value.astype(dtype), *axes)())

        self.fixed_start = config.memory.start == "fixed"
        self.start_weights = nnx.List([parameter(weight) for weight in start.pop("weights")])
        self.slow = nnx.Dict({name: parameter(value) for name, value in start.items()})

        choices = gate_choices(config.memory)
        self.gate_functions = (choices.step_size_gate, choices.retention_gate)
        kernel = logical(initializers.truncated_normal(0.1), None, "heads", None)
        self.gate_kernel = nnx.Param(kernel(rngs.params(), (2, *heads), dtype))
        biases = jnp.asarray([starts_of_heads(gate.start, config.num_heads) for gate in self.gate_functions], dtype)
        self.gate_bias = nnx.Param(logical(lambda: biases, None, "heads")())
        shared = config.memory.share_steps and config.memory.step_unit == "error"
        self.shares_steps = shared and self.rule.chunk_size > 1
        self.make_output(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, state: SelfReferentialState | None = None, documents: Documents | None = None
    ) -> tuple[jax.Array, SelfReferentialState, dict[str, jax.Array]]:
        """Read and write x [b, t, dim].

        Args:
          state: of the tokens before; None is the start of a sequence.
          documents: packed documents, aligned to `chunk_size` (else all reads of the row are NaN); each starts with the
            memories of the sequence's start.

        Returns:
          y [b, t, dim], the state after x, and the report of M_memory (`memory_report`; none without `writes`). After
          documents the state is for inspection: reading cannot go on from it.
        """
        # Without this, XLA's partitioner mixes up some rows of a batch on a mesh of data, fsdp and tensor.
        x = constrain(x, BATCH, None, None)
        start = self.start()
        if state is None:
            state = broadcast(start, x.shape[0])
        inputs, tails = self._inputs(x, state, documents, start)
        params = self.params()
        if not self.writes:
            own = memories_of((broadcast(params, x.shape[0]), state.memories.weights), slice(-1, None))
            reads = self._retrieve(*own, inputs.queries)[:, 0]
            return self.output(x, self.kept(reads)), state._replace(tails=tails), {}
        # A copy of each for every row: gradients of a single one would be summed over rows in every chunk.
        shared = (params, (self.gate_kernel[...], self.gate_bias[...]), start.memories.weights)
        step = functools.partial(self._chunk, *broadcast(shared, x.shape[0]))
        memories, steps, outputs = scan_chunks(
            step, self.rule.chunk_size, state.memories, state.tails.get("steps"), inputs
        )
        reads = outputs.reads
        if documents is not None:
            reads = jnp.where(aligned(documents, self.rule.chunk_size)[:, None, None, None], reads, jnp.nan)
        gates = memory.Gates(outputs.log_retention[..., None], None, outputs.step_size[..., None], inputs.mask)
        own, weights = jax.tree.map(lambda leaf: leaf[-1], params), tuple(w[:, -1] for w in memories.weights)
        report = memory_report(self.rule, own, gates, outputs.values, outputs.surprise, weights)
        tails |= {} if steps is None else {"steps": steps}
        return self.output(x, self.kept(reads)), SelfReferentialState(memories, tails), report

    def start(self) -> SelfReferentialState:
        """The state before a document's first token, without the batch axis."""
        first = jax.vmap(jax.vmap(lambda params: memory.init_state(self.rule, params)))(self.params())
        history = jnp.zeros((self.convolution.size - 1, self.num_heads * self.head_dim), self.dtype)
        tails = {"tokens": history, "query": history}
        if self.shares_steps:
            sizes = self.num_heads, self.head_dim, self.rule.chunk_size
            tails["steps"] = init_tail(*sizes, self.dtype, wide_dtype(self.dtype))
        return SelfReferentialState(at(first, 0), tails)

    def init_state(self, batch: int) -> SelfReferentialState:
        """`start` for every row of a batch, as arrays only: the state that streaming starts with."""
        state = broadcast(self.start(), batch)
        return state._replace(memories=at(state.memories, jnp.zeros((), jnp.int32)))

    def params(self) -> memory.Params:
        """The memories' slow parameters [n, h, ...]."""
        slow = {name: value[...] for name, value in self.slow.items()}
        weights = tuple(weight[...] for weight in self.start_weights)
        return {"weights": jax.lax.stop_gradient(weights) if self.fixed_start else weights, **slow}

    def _inputs(
        self, x: jax.Array, state: SelfReferentialState, documents: Documents | None, start: SelfReferentialState
    ) -> tuple[ChunkInputs, dict[str, Any]]:
        """What does not depend on the memories, and the convolutions' next tails."""
        first = {} if documents is None else start.tails
        tokens, own = self.convolution.features(
            x,
            state.tails["tokens"],
            documents,
            first.get("tokens"),
            activation=self.config.memory.activation,
            unit_norm=self.head_dim,
        )
        tokens = tokens.reshape(*x.shape[:2], self.num_heads, self.head_dim)
        queries, query = self.query(x, state.tails["query"], documents, first.get("query"))
        packed = (None, None) if documents is None else (documents.mask, documents.starts)
        return ChunkInputs(tokens, queries, *packed), state.tails | {"tokens": own, "query": query}

    def _chunk(
        self,
        params: memory.Params,
        gate_params: tuple[jax.Array, jax.Array],
        first: tuple[jax.Array, ...],
        state: memory.MemoryState,
        tail: StepTail | None,
        inputs: ChunkInputs,
        valid: jax.Array | None,
    ) -> tuple[memory.MemoryState, StepTail | None, ChunkOutputs]:
        """Tokens of one chunk; params [b, n, h, ...], gate_params: kernel and bias [b, 2, h, ...], first: the weights
        that documents start with, [b, n, h, ...]."""
        mask = inputs.mask
        if inputs.begins is not None:  # documents are read from a chunk's start on
            fresh = lambda new, old: jnp.where(flags_like(inputs.begins[:, 0], old), new, old)  # noqa: E731
            weights = jax.tree.map(fresh, first, state.weights)
            state = memory.MemoryState(weights, (), weights, 0)
        if valid is not None:
            mask = jnp.broadcast_to(valid[None], inputs.tokens.shape[:2])
        made = self._retrieve(*memories_of((params, state.anchor), slice(-1)), inputs.tokens)
        key, value, step_size, retention = (made[:, i] for i in range(len(MEMORIES) - 1))
        key, value = (l2_normalize(x).astype(self.dtype) for x in (key, value))
        gates = self._gates(jnp.stack([step_size, retention], axis=1), *gate_params, mask)
        if self.shares_steps:
            gates, tail = self._share(gates, key, tail, state.position, valid)
        targets = self._retrieve(params, state.anchor, value).astype(self.dtype)

        written = []
        for part in (slice(0, -1), slice(-1, None)):  # only the last one is read at every token
            own = memories_of((params, at(state, None)), part)
            written.append(self._memorize(*own, state.position, inputs.queries, key, targets[:, part], gates))
        (_, others, _), (reads, own, surprise) = written
        after = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), others, own)
        surprise = jax.tree.map(lambda leaf: leaf[:, 0], surprise)
        outputs = ChunkOutputs(reads[:, 0], targets[:, -1], gates.log_retention, gates.step_size, surprise)
        return at(after, state.position), tail, outputs

    def _gates(self, made: jax.Array, kernel: jax.Array, bias: jax.Array, mask: jax.Array | None) -> memory.Gates:
        """Gates [b, c, h] from the reads of M_step_size and M_retention, [b, 2, c, h, d], with a kernel [b, 2, h, d]
        and a bias [b, 2, h]. Only the direction of a read counts, so that a large memory does not make a large step."""
        logits = jnp.einsum("bncha,bnha->nbch", l2_normalize(made), kernel) + jnp.swapaxes(bias, 0, 1)[:, :, None]
        step_size, log_retention = (gate.function(x) for gate, x in zip(self.gate_functions, logits, strict=True))
        return memory.Gates(log_retention, None, step_size_bound(self.config) * step_size, mask)

    def _share(
        self, gates: memory.Gates, keys: jax.Array, tail: StepTail, position: Any, valid: jax.Array | None
    ) -> tuple[memory.Gates, StepTail]:
        """Gates whose steps are shared by similar keys of a chunk (`shared_steps`), and the next tail."""
        shares = error_share(self.config, gates.step_size)
        shares = shares if gates.mask is None else jnp.where(gates.mask[..., None], shares, 0)
        left, after = shared_steps(shares, keys, tail, position, self.rule.chunk_size)
        if valid is not None:  # slots behind the last token stay out of the tail
            last = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=self.rule.chunk_size - 1, axis=1)
            after = StepTail(*(last(row, jnp.sum(valid, dtype=jnp.int32)) for row in joined(tail, shares, keys)))
        return dataclasses.replace(gates, step_size=gates.step_size * left), after

    def _retrieve(self, params: memory.Params, carried: tuple[jax.Array, ...], queries: jax.Array) -> jax.Array:
        """Read memories at what they carry at a chunk's start [b, m, h, ...] with queries [b, c, h, d]:
        [b, m, c, h, d]."""

        def one(params: memory.Params, carried: tuple[jax.Array, ...], queries: jax.Array) -> jax.Array:
            return memory.retrieve(self.rule, params, memory.MemoryState(carried, (), carried, 0), queries)

        heads = jax.vmap(one, in_axes=(0, 0, 1), out_axes=1)
        return jax.vmap(jax.vmap(heads, in_axes=(0, 0, None)))(params, carried, queries)

    def _memorize(
        self,
        params: memory.Params,
        state: memory.MemoryState,
        position: int | jax.Array,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        gates: memory.Gates,
    ) -> tuple[jax.Array, memory.MemoryState, memory.Surprise]:
        """`memory.memorize` for memories [b, m, h, ...] with keys and queries [b, c, h, d], values [b, m, c, h, d]:
        reads [b, m, c, h, d], the states after it without position, the surprise [b, m, c, h]."""
        form = "recurrent" if keys.shape[1] == 1 else self.form

        def one(position, params, state, queries, keys, values, gates):
            reads, after, surprise = memory.memorize(
                self.rule, params, at(state, position), queries, keys, values, gates, form, return_surprise=True
            )
            return reads, at(after, None), surprise

        of_head = dataclasses.replace(jax.tree.map(lambda _: 1, gates), mask=None)
        heads = jax.vmap(one, in_axes=(None, 0, 0, 1, 1, 1, of_head), out_axes=(1, 0, 1))
        memories = jax.vmap(heads, in_axes=(None, 0, 0, None, None, 0, None))
        rows = jax.vmap(memories, in_axes=(None, 0, 0, 0, 0, 0, 0))
        return rows(position, params, state, queries, keys, values, gates)


def memories_of(tree: Any, part: slice) -> Any:
    """Leaves [b, n, ...] of some of the memories."""
    return jax.tree.map(lambda leaf: leaf[:, part], tree)
