"""The neural memory as a layer: projections in front, one memory per head, norm and gate behind (Titans 4.4).

    q, k, v = silu(conv(x W))          each its own projection and convolution; q and k to unit norm per head
    alpha, eta, theta = gates(x)       per token, head and fast matrix, or as the preset's paper has them
    theta = shared(theta, k)           among near keys of a chunk, where theta has a bound (`shared_steps`)
    r = memory(q, k, v, gates)         titans_jax.memory, for a batch and heads; with `value_skip` + D v
    y = (rms_norm(r) * silu(x W_g)) W_o                   `prediction_gate` adds to the logits x W_g

Shapes: b batch, t time, h heads, d head_dim, m fast matrices of one memory.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from titans_jax import memory
from titans_jax.config import (
    ConfigError,
    ModelConfig,
    gate_choices,
    gates_predictions,
    memory_rule,
    projects_skip,
    sizes_values,
    skips_values,
    ties_keys,
)
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.head_inputs import HeadInputs, head_axes, per_device
from titans_jax.layers.head_reads import HeadReads
from titans_jax.layers.memory_gates import MemoryGates
from titans_jax.layers.memory_input import MemoryInput, of_token_before, start_as_induction, start_near_to_far
from titans_jax.layers.memory_report import memory_report
from titans_jax.layers.preconditioner import Preconditioner
from titans_jax.layers.prediction_gate import PredictionGate, PredictionTail, Reads
from titans_jax.layers.projections import compute_dtype, param_dtype
from titans_jax.layers.rotation import RotatedInputs, Rotation, RotationTail
from titans_jax.layers.scan_chunks import at
from titans_jax.layers.shared_steps import StepTail, init_tail, shared_steps
from titans_jax.ops.matmul import wide_dtype
from titans_jax.sharding import (
    HEADS,
    constrain,
    logical,
    wide_sides,
)

FIRST_SKIP = 0.5
"""What the factor of `value_skip` starts at: with 1, recall is learned later (memory/what_was_tried.md)."""

OTHER_LAYERS = {"caching": None, "local_chunks": (), "log_linear_levels": 0}
"""Fields of `MemoryConfig` that need `CachedMemory`, `HierarchicalMemory` or `LogLinearMemory`, and for each the value
that switches it off."""


def check_other_layers(config: ModelConfig, block: str, why: str) -> None:
    """Refuse memories that are kept, in shards or in levels, for a block that has none of these.

    Raises:
      ConfigError: names the field, the block and why.
    """
    for name, without in OTHER_LAYERS.items():
        value = getattr(config.memory, name)
        if value != without:
            raise ConfigError(
                f"model.memory.{name} is {value!r}, which {block} does not do, as {why}; use {without!r}, or a pattern "
                "of lmm, mag, mal or retrofit"
            )


class MemoryLayerState(NamedTuple):
    """What the layer carries.

    memory: of every head [b, h, ...]. tails: the last inputs of the convolutions by name; "key", the last query, where
    keys are tied and have no convolution; "steps", the last keys and their steps, where steps are shared; "squares",
    the sums of a preconditioner; "rotation", the phases and the last token's key and value; "prediction", the last
    token's read and hits, where the gate sees predictions.
    """

    memory: memory.MemoryState
    tails: dict[str, jax.Array | StepTail | RotationTail | PredictionTail]


class NeuralMemory(HeadReads):
    """A sequence layer that learns while it reads, [b, t, dim] -> [b, t, dim].

    One independent memory per head. Its start M_0 is a learned parameter per head (memory/README.md, Readings), a fixed
    one that no gradient reaches, or zero.
    """

    provides: tuple[str, ...] = ()
    """The fields of `OTHER_LAYERS` that this layer implements."""
    tied = False
    """Whether a token's key is the query of the token before (`tie_keys`)."""
    prediction: PredictionGate | None = None
    """With `prediction_gate`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        for name, without in OTHER_LAYERS.items():
            value = getattr(config.memory, name)
            if value != without and name not in self.provides:
                raise ConfigError(
                    f"model.memory.{name} is {value!r}, which a {type(self).__name__} does not do; use {without!r}, "
                    "or the layer that `layers.memory_layer` makes"
                )
        choices, rule = gate_choices(config.memory), memory_rule(config.memory)
        copies, rank = choices.projected_steps(rule), choices.key_rank(rule)
        projected = functools.partial(MemoryInput, config, rngs=rngs)
        self.query = projected(unit_norm=True, copies=rank)
        gate = choices.complement_keys  # one logit makes a channel of the key and what it forgets
        self.tied = ties_keys(config.memory)
        self.key = None if self.tied else projected(unit_norm=not gate, logits=gate, copies=copies * rank)
        sized = {"unit_norm": sizes_values(config.memory), "length": config.head_dim**0.5}
        self.value = projected(**sized, copies=copies)
        induction = config.memory.key_start == "induction" and copies == 1 and not gate and config.conv_size > 1
        if induction and self.tied:
            start_near_to_far(self.query, self.value)
        elif induction:
            start_as_induction(self.query, self.key)
        self._make_memories(config, rngs=rngs)
        self.skip = self._make_skip(config) if skips_values(config.memory) else None
        own = projects_skip(config.memory)
        self.skip_value = projected(**sized) if own else None
        self.prediction = PredictionGate(config, rngs=rngs) if gates_predictions(config.memory) else None
        self.make_output(config, rngs=rngs)

    def _make_memories(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        """The memories of all heads, without the projections in front of them and the output behind them."""
        self.rule, self.form = memory_rule(config.memory), config.memory.form
        self.rematerialised = config.remat != "none"
        self.num_heads, self.head_dim, self.dtype = config.num_heads, config.head_dim, compute_dtype(config)
        keys = jax.random.split(rngs.params(), config.num_heads)
        start = jax.vmap(lambda key: memory.init_params(self.rule, key, config.head_dim))(keys)

        def parameter(value: jax.Array, axes: tuple[str | None, ...]) -> nnx.Param:
            return nnx.Param(logical(lambda: value.astype(param_dtype(config)), *axes)())

        weights = [parameter(weight, wide_sides(weight.shape)) for weight in start.pop("weights")]
        self.fixed_start = config.memory.start == "fixed"
        self.start_weights = nnx.List(weights if self.rule.learned_start else [])
        by_head = lambda value: ("heads",) + (None,) * (value.ndim - 1)  # noqa: E731
        self.slow = nnx.Dict({name: parameter(value, by_head(value)) for name, value in start.items()})

        choices = gate_choices(config.memory)
        self.gates = MemoryGates(config, self.rule, rngs=rngs)
        shared = config.memory.share_steps and config.memory.step_unit == "error" and choices.bounded
        # A chunk's orthogonal step counts similar keys, which are one direction, only once; a stale chunk is too long.
        shared = shared and not self.rule.algorithm.steps_by_chunk and not self.rule.stale
        self.shares_steps = shared and self.rule.chunk_size > 1 and self.rule.algorithm.steps == 1
        self.preconditioner = Preconditioner(config, rngs=rngs) if choices.preconditioned else None
        self.rotation = Rotation(config, choices.key_rank(self.rule), rngs=rngs) if choices.rotated_keys else None

    def _make_skip(self, config: ModelConfig) -> nnx.Param | None:
        """The factors of `value_skip` [h]; none where a rotation has them."""
        if self.rotation is not None:
            return None
        start = jnp.full(config.num_heads, FIRST_SKIP, param_dtype(config))
        return nnx.Param(logical(lambda: start, "heads")())

    def __call__(
        self,
        x: jax.Array,
        state: MemoryLayerState | None = None,
        documents: Documents | None = None,
        persistent: jax.Array | None = None,
    ) -> tuple[jax.Array, MemoryLayerState, dict[str, jax.Array]]:
        """Write every token of x [b, t, dim], and read the memory with its query after the write.

        Args:
          state: of the tokens before; None is the start of a sequence.
          documents: packed documents, aligned to `chunk_size`; each starts with the memory of the sequence's start.
          persistent: [n, dim], read before the first token of a sequence and of every document.

        Returns:
          y [b, t, dim], the state after x, and a report (see `memorize`). After documents the state is for inspection:
          reading cannot go on from it.
        """
        start = None
        if state is None or documents is not None:
            start = self.start(persistent)
        if state is None:
            state = broadcast(start, x.shape[0])
        reads, state, report = self.memorize(x, state, documents, start)
        return self.read_out(x, reads), state, report

    def memorize(
        self,
        x: jax.Array,
        state: MemoryLayerState,
        documents: Documents | None = None,
        start: MemoryLayerState | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[Reads, MemoryLayerState, dict[str, jax.Array]]:
        """Write x [b, t, dim]: the raw reads, the next state, and a report.

        Args as of a call; mask: bool [b, t], False at padding, where there are no documents; start: the state of a
        document's start, without the batch axis.

        The report is that of `memory_report`. Without `writes` the state's memory stays as it is, and the report is
        empty.
        """
        features, state = self.features(x, state, documents, start)
        if not self.writes:
            reads, report = self.retrieve(state.memory.weights, features["query"]), {}
        else:
            inputs, state = self.head_inputs(x, features, state, documents, start, mask)
            reads, state, report = self.write(inputs, state, start)
        reads, state = self.complete(reads, features, state, documents, start)
        return reads, state, report

    def features(
        self,
        x: jax.Array,
        state: MemoryLayerState,
        documents: Documents | None = None,
        start: MemoryLayerState | None = None,
    ) -> tuple[dict[str, jax.Array], MemoryLayerState]:
        """Queries, keys and values of x by name, [b, t, h, (n,) d], with "skip" the values that `value_skip` adds; and
        the state with the convolutions' next tails."""
        features, tails = {}, {}
        for name, module in self.inputs().items():
            initial_tail = None if start is None else start.tails[name]
            features[name], tails[name] = module(x, state.tails[name], documents, initial_tail)
        if self.tied:
            first = None if start is None else start.tails["key"]
            features["key"], tails["key"] = of_token_before(features["query"], state.tails["key"], documents, first)
        features.setdefault("skip", features["value"])
        features["query"] = self.gates.queries(features["query"], features["key"])
        return features, MemoryLayerState(state.memory, state.tails | tails)

    def head_inputs(
        self,
        x: jax.Array,
        features: dict[str, jax.Array],
        state: MemoryLayerState,
        documents: Documents | None = None,
        start: MemoryLayerState | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[HeadInputs, MemoryLayerState]:
        """The inputs of the memories, made of x, and the state with the other next tails."""
        resets, tails = None, {}
        if documents is not None:
            mask, resets = documents.mask, documents.starts
        queries = features["query"]
        keys, values, gates = self.gates(x, features["key"], features["value"], mask)
        if self.rotation is not None:
            initial = None if start is None else start.tails["rotation"]
            rotated = RotatedInputs(queries, keys, values, gates)
            rotated, tails["rotation"] = self.rotation(x, rotated, state.tails["rotation"], documents, initial)
            queries, keys, values, gates = rotated
        if self.preconditioner is not None:
            initial = None if start is None else start.tails["squares"]
            factors, tails["squares"] = self.preconditioner(
                x, features["key"], state.tails["squares"], mask, documents, initial
            )
            gates = dataclasses.replace(gates, key_step_size=factors)
        if self.shares_steps:
            left, tails["steps"] = shared_steps(
                self.gates.error_shares(gates), keys, state.tails["steps"], state.memory.position, self.rule.chunk_size
            )
            gates = dataclasses.replace(gates, step_size=gates.step_size * left[..., None])
        inputs = HeadInputs(queries, keys, values, gates, resets)
        return inputs, MemoryLayerState(state.memory, state.tails | tails)

    def write(
        self, inputs: HeadInputs, state: MemoryLayerState, start: MemoryLayerState | None = None
    ) -> tuple[jax.Array, MemoryLayerState, dict[str, jax.Array]]:
        """Write the inputs: reads [b, t, h, (r,) d], the state with the memories after them, and a report."""
        first = None if start is None else broadcast(start.memory, len(inputs.queries))
        reads, after, surprise, _ = self._memorize(state.memory, inputs, first)
        report = memory_report(self.rule, self.params(), inputs.gates, inputs.values, surprise, after.weights)
        return self.whole_reads(inputs, reads), MemoryLayerState(after, state.tails), report

    def whole_reads(self, inputs: HeadInputs, reads: jax.Array) -> jax.Array:
        """Reads [b, t, h, (r,) d] of a token's own queries, of what `memorize` read."""
        return reads if self.rotation is None else self.rotation.whole_reads(inputs, reads)

    def own_queries(self, inputs: HeadInputs) -> jax.Array:
        """A token's own queries [b, t, h, (r,) d]."""
        return inputs.queries if self.rotation is None else self.rotation.own(inputs.queries)

    def complete(
        self,
        reads: jax.Array,
        features: dict[str, jax.Array],
        state: MemoryLayerState,
        documents: Documents | None = None,
        start: MemoryLayerState | None = None,
    ) -> tuple[Reads, MemoryLayerState]:
        """Reads [b, t, h, (r,) d] with their skip and hits, and the state with the next tail of `prediction`."""
        # Named before the hits, or a backward pass would run the memory's kernel once more for their slopes.
        reads, hits = self.kept(reads), None
        if self.prediction is not None:
            first = None if start is None else start.tails["prediction"]
            hits, tail = self.prediction.hits(reads, features["value"], state.tails["prediction"], documents, first)
            state = MemoryLayerState(state.memory, state.tails | {"prediction": tail})
        return Reads(self.with_skip(reads, features["skip"]), hits), state

    def read_out(self, x: jax.Array, reads: Reads) -> jax.Array:
        """`output` of what `memorize` read, [b, t, dim]."""
        return self.output(x, reads.reads, None if reads.hits is None else self.prediction(reads.hits))

    def inputs(self) -> dict[str, MemoryInput]:
        """The projections that a token goes through."""
        modules = {"query": self.query, "key": self.key, "value": self.value, "skip": self.skip_value}
        return {name: module for name, module in modules.items() if module is not None}

    def with_skip(self, reads: jax.Array, values: jax.Array) -> jax.Array:
        """Reads plus the skip of `value_skip`, if there is one; values: a token's own or those of `skip_projection`,
        [b, t, h, d]."""
        if self.rotation is not None:
            return self.rotation.with_skip(reads, values)
        if self.skip is None:
            return reads
        return reads + self.skip[...].astype(reads.dtype)[None, None, :, None] * values.astype(reads.dtype)

    def gated(self, normed: jax.Array, gate: jax.Array) -> jax.Array:
        """As of `HeadReads`; with ranks, normed is [b, t, r, h, d], and the ranks are mixed."""
        if normed.ndim == 4:
            return super().gated(normed, gate)
        return self.rotation.gated(normed, gate)

    def retrieve(self, weights: tuple[jax.Array, ...], queries: jax.Array) -> jax.Array:
        """Read weights [b, h, ...] with queries [b, t, h, (r,) d] and change nothing: [b, t, h, (r,) d]."""

        def one(params: memory.Params, weights: tuple[jax.Array, ...], queries: jax.Array) -> jax.Array:
            state = memory.MemoryState(weights=weights, momentum=(), anchor=weights, position=0)
            return memory.retrieve(self.rule, params, state, queries)

        heads = jax.vmap(one, in_axes=(0, 0, 1), out_axes=1)
        return jax.vmap(heads, in_axes=(None, 0, 0))(self.params(), weights, queries)

    def start(self, persistent: jax.Array | None = None) -> MemoryLayerState:
        """The state before a document's first token, without the batch axis: M_0 with no momentum and no history, or
        the state that reading persistent tokens [n, dim] makes of that.

        A chunk starts after the persistent tokens, so that a document starts with a chunk whatever n is.
        """
        params = self.params()
        first = jax.vmap(lambda params: memory.init_state(self.rule, params))(params)
        shapes = {name: (x.convolution.size - 1, x.projection.out_features) for name, x in self.inputs().items()}
        tails = {name: jnp.zeros(shape, self.dtype) for name, shape in shapes.items()}
        if self.tied:
            tails["key"] = jnp.zeros(self.query.heads, self.dtype)
        if self.shares_steps:
            sizes = self.num_heads, self.head_dim, self.rule.chunk_size
            tails["steps"] = init_tail(*sizes, self.dtype, wide_dtype(self.dtype))
        if self.preconditioner is not None:
            tails["squares"] = jnp.zeros((self.num_heads, self.head_dim), wide_dtype(self.dtype))
        if self.rotation is not None:
            tails["rotation"] = self.rotation.start(self.dtype)
        if self.prediction is not None:
            tails["prediction"] = self.prediction.start()
        state = MemoryLayerState(at(first, 0), tails)
        if persistent is None:
            return state
        _, state, _ = self.memorize(persistent[None], broadcast(state, 1))
        after, tails = jax.tree.map(lambda leaf: leaf[0], (at(state.memory, None), state.tails))
        return MemoryLayerState(memory.start_chunk(after), tails)

    def init_state(
        self, batch: int, persistent: jax.Array | None = None, max_length: int | None = None
    ) -> MemoryLayerState:
        """`start` for every row of a batch, as arrays only: the state that streaming starts with. Its size is the same
        whatever is read, so max_length changes nothing."""
        state = broadcast(self.start(persistent), batch)
        return state._replace(memory=at(state.memory, jnp.zeros((), jnp.int32)))

    def params(self) -> memory.Params:
        """The memory's slow parameters, with a leading heads axis."""
        slow = {name: value[...] for name, value in self.slow.items()}
        if self.rule.learned_start:
            # Whole on every device before the memory runs: a chunk of it never waits for another device.
            whole = tuple(constrain(weight[...], HEADS, None, None) for weight in self.start_weights)
            return {"weights": jax.lax.stop_gradient(whole) if self.fixed_start else whole, **slow}
        shapes = self.rule.shapes(self.head_dim)
        dtype = wide_dtype(self.dtype)
        return {"weights": tuple(jnp.zeros((self.num_heads, *shape), dtype) for shape in shapes), **slow}

    def _memorize(
        self,
        state: memory.MemoryState,
        inputs: HeadInputs,
        start: memory.MemoryState | None,
        read_on: bool = False,
        segment: int | None = None,
    ) -> tuple[jax.Array, memory.MemoryState, memory.Surprise, tuple[jax.Array, ...] | None]:
        """`memory.memorize` for a batch of heads. Position is shared by all of them, so it is not mapped over.

        read_on: whether reading goes on from the state after x although there are resets; without resets it always may.
        The last result are the ends of segments, [b, h, n, in, out], or None.
        """
        batch, time = inputs.queries.shape[:2]
        position = state.position
        form = "recurrent" if time == 1 else memory.choose_form(self.form, self.rule, inputs.gates)

        def one(position, params, state, inputs: HeadInputs, start):
            reads, state, surprise, *ends = memory.memorize(
                self.rule,
                params,
                at(state, position),
                *inputs[:4],
                form,
                resets=inputs.resets,
                initial_state=None if start is None else at(start, 0),
                return_surprise=True,
                return_anchor=read_on or inputs.resets is None,
                rematerialised=self.rematerialised,
                segment=segment,
            )
            return reads, at(state, None), surprise, ends[0] if ends else None

        heads = jax.vmap(one, in_axes=(None, 0, 0, head_axes(inputs), 0), out_axes=(1, 0, 1, 0))
        rows = jax.vmap(heads, in_axes=(None, 0, 0, 0, 0))
        # One copy a row: gradients of what rows share would be summed over them, and over the devices that hold them,
        # at every chunk of the scan.
        params = broadcast(self.params(), batch)
        arguments = (params, at(state, None), inputs, None if start is None else at(start, None))
        run = per_device(rows, batch, inputs.gates) if form == "fused" else rows
        reads, after, surprise, ends = run(position, *arguments)
        # Documents start with a chunk, so the open chunk has the same length in every row.
        return (
            reads,
            at(after, (position + time * self.rule.algorithm.steps) % self.rule.chunk_size),
            surprise,
            ends,
        )


def broadcast(state: Any, batch: int) -> Any:
    """A state without batch axis for every row of a batch; a position, one number for all rows, stays as it is."""
    return jax.tree.map(lambda x: x if isinstance(x, int) else jnp.broadcast_to(x, (batch, *x.shape)), state)
