"""TNT (arXiv 2511.07343) as a layer: a long-chunked memory of the whole sequence, and local memories of its shards.

    y_t = f(V at the start of t's chunk, q_t) + sum_i f(W(i)_t, P_t q_t)          eq 7, f the memory's network
    P_t = sum of k_j k_j^T / ||k_j||^2 over the tokens j <= t of t's shard        appendix C

V, of `chunk_size`, is carried along the sequence and read as it was at its chunk's start (`MemoryRule.stale`). The
local memories W(i), of `local_chunks`, and P begin anew with every shard, so that in training a row's shards are read
at once, as rows of a larger batch. All memories share the projections of queries, keys and values; each has its own
gates, learned start and norm scales. P q is linear attention with keys for values (`key_projection`). How we read the
paper: memory/later_models.md, TNT.

Shapes: b batch, t time, h heads, d head_dim, n shards.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from titans_jax import memory
from titans_jax.config import ModelConfig, local_memories
from titans_jax.layers.document_layout import Documents, aligned
from titans_jax.layers.head_inputs import HeadInputs
from titans_jax.layers.key_projection import key_projection
from titans_jax.layers.memory_input import MemoryInput
from titans_jax.layers.memory_report import memory_report
from titans_jax.layers.neural_memory import MemoryLayerState, NeuralMemory, broadcast
from titans_jax.layers.prediction_gate import Reads
from titans_jax.memory.state import Carried
from titans_jax.ops.matmul import wide_dtype

Report = dict[str, jax.Array]


class ShardState(NamedTuple):
    """What a shard carries from token to token: P [b, h, d, d] as the weights of a memory whose position counts the
    tokens since the shard's start, and the local memories."""

    projection: memory.MemoryState
    local: tuple[MemoryLayerState, ...]


class ShardStart(NamedTuple):
    """What every shard begins with, without the batch axis: P [h, d, d], and what each local memory carries."""

    projection: jax.Array
    local: tuple[Carried, ...]

    @classmethod
    def of(cls, state: ShardState) -> ShardStart:
        """The start that equals this state."""
        return cls(state.projection.weights[0], tuple(Carried.of(one.memory) for one in state.local))

    def after(self, state: ShardState) -> ShardState:
        """The state at the next shard's start, after the last one's state: this start for every row, and the same
        tails."""
        (P,) = state.projection.weights
        projection = dataclasses.replace(state.projection, weights=(jnp.broadcast_to(self.projection, P.shape),))
        both = zip(self.local, state.local, strict=True)
        local = tuple(one._replace(memory=broadcast(carried.state(), len(P))) for carried, one in both)
        return ShardState(projection, local)


class HierarchicalState(NamedTuple):
    """What the layer carries. running: the global memory and the tails of convolutions. shard: the open shard. first:
    what the next shard begins with, the same for all rows; None in a state that `start` made."""

    running: MemoryLayerState
    shard: ShardState
    first: ShardStart | None


class LocalMemory(NeuralMemory):
    """The local memories of all heads: they are given queries, keys and values, and make their own gates."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self._make_memories(config, rngs=rngs)

    def inputs(self) -> dict[str, MemoryInput]:
        """None."""
        return {}


class HierarchicalMemory(NeuralMemory):
    """A `NeuralMemory` that is read as it was at its chunk's start, with local memories, [b, t, dim] -> the same.

    Calls are those of `NeuralMemory`, except that documents must start at multiples of both chunk and shard (else all
    reads of the row are NaN). Without `writes` all memories stay at their start; P, which holds no values, is still
    summed.
    """

    provides = ("local_chunks",)

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        if self.form == "fused":  # no kernel runs a stale rule, nor needs it: its chunk is one large product
            self.form = "chunked"
        self.shard = config.memory.shard
        memories = [dataclasses.replace(config, memory=each) for each in local_memories(config.memory)]
        self.local = nnx.List([LocalMemory(each, rngs=rngs) for each in memories])

    def memorize(
        self,
        x: jax.Array,
        state: HierarchicalState,
        documents: Documents | None = None,
        start: HierarchicalState | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[Reads, HierarchicalState, Report]:
        """As of `NeuralMemory`; the report is the mean of all memories'."""
        reads, state, report = self._memorize_shards(x, state, documents, start, mask, shard=self.shard)
        if documents is not None:
            at_shards = aligned(documents, self.shard)[:, None, None, None]
            reads = reads._replace(reads=jnp.where(at_shards, reads.reads, jnp.nan))
        return reads, state, report

    def start(self, persistent: jax.Array | None = None) -> HierarchicalState:
        """As of `NeuralMemory`: the persistent tokens are written into all memories, and into P, and every shard begins
        with what they left."""
        local = tuple(each.start() for each in self.local)
        empty = jnp.zeros((self.num_heads, self.head_dim, self.head_dim), wide_dtype(self.dtype))
        projection = memory.MemoryState((empty,), (), (), 0)
        state = HierarchicalState(super().start(), ShardState(projection, local), None)
        if persistent is None:
            return state
        _, after, _ = self._memorize_shards(persistent[None], broadcast(state, 1), shard=len(persistent))
        after = jax.tree.map(lambda leaf: leaf[0], without_positions(after._replace(first=None)))
        begin = lambda state: state._replace(memory=memory.start_chunk(state.memory))  # noqa: E731
        projection = dataclasses.replace(after.shard.projection, position=0)
        local = tuple(begin(one) for one in after.shard.local)
        return HierarchicalState(begin(after.running), ShardState(projection, local), None)

    def init_state(
        self, batch: int, persistent: jax.Array | None = None, max_length: int | None = None
    ) -> HierarchicalState:
        """As of `NeuralMemory`."""
        start = self.start(persistent)
        return as_arrays(broadcast(start, batch)._replace(first=ShardStart.of(start.shard)))

    def _memorize_shards(
        self,
        x: jax.Array,
        state: HierarchicalState,
        documents: Documents | None = None,
        start: HierarchicalState | None = None,
        mask: jax.Array | None = None,
        *,
        shard: int,
    ) -> tuple[Reads, HierarchicalState, Report]:
        """`memorize` with shards of this many tokens, wherever they start."""
        batch, time = x.shape[:2]
        running_start = None if start is None else start.running
        first = state.first if start is None else ShardStart.of(start.shard)
        features, running = self.features(x, state.running, documents, running_start)
        reports = []
        if self.writes:
            inputs, running = self.head_inputs(x, features, running, documents, running_start, mask)
            reads, running, report = self.write(inputs, running, running_start)
            reports.append(report)
        else:
            reads = self.retrieve(running.memory.weights, features["query"])
        inputs, opened = self._shard_inputs(x, features, state.shard, documents, mask)
        position = opened.projection.position
        if isinstance(position, int) and position == 0:
            found, opened, report = self._shards_at_once(
                inputs, opened if first is None else first.after(opened), shard
            )
        else:
            shards = (position + jnp.arange(time, dtype=jnp.int32)) // shard
            found, opened, report = self._one_stretch(inputs, opened, shards, first)
        projection = dataclasses.replace(opened.projection, position=(position + time) % shard)
        if self.writes:
            report = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *reports, *report)
        reads, running = self.complete(reads + found, features, running, documents, running_start)
        state = HierarchicalState(running, opened._replace(projection=projection), first)
        return reads, as_arrays(state), report if self.writes else {}

    def _shard_inputs(
        self,
        x: jax.Array,
        features: dict[str, jax.Array],
        state: ShardState,
        documents: Documents | None,
        mask: jax.Array | None,
    ) -> tuple[tuple[HeadInputs, ...], ShardState]:
        """The inputs of the local memories, and the state with their next tails. Documents begin with a shard, and
        shards with a chunk, so that no steps are shared with tokens before them."""
        found, after = [], []
        for local, state_before in zip(self.local, state.local, strict=True):
            inputs, state_after = local.head_inputs(x, features, state_before, documents, None, mask)
            found.append(inputs._replace(resets=None))
            after.append(state_after)
        return tuple(found), state._replace(local=tuple(after))

    def _shards_at_once(
        self, inputs: tuple[HeadInputs, ...], state: ShardState, shard: int
    ) -> tuple[jax.Array, ShardState, list[Report]]:
        """Inputs [b, t, ...] that start with a shard: whole shards as rows of one batch, then the rest."""
        batch, time = inputs[0].queries.shape[:2]
        whole = time // shard
        done, parts = whole * shard, []
        if whole:
            # Each row's state, once per shard: on the merged axis the shards of a row are neighbours, as in the inputs.
            begin = jax.tree.map(lambda leaf: jnp.repeat(leaf, whole, axis=0), without_positions(state))
            begin = with_positions(begin, state)
            cut = jax.tree.map(lambda leaf: leaf[:, :done].reshape(batch * whole, shard, *leaf.shape[2:]), inputs)
            found, after, reports = self._one_stretch(cut, begin)
            tokens = lambda leaf: leaf.reshape(batch, done, *leaf.shape[2:])  # noqa: E731
            last = lambda leaf: leaf.reshape(batch, whole, *leaf.shape[1:])[:, -1]  # noqa: E731
            reports = [{n: tokens(r) if r.ndim > 1 else last(r) for n, r in report.items()} for report in reports]
            after = with_positions(jax.tree.map(last, without_positions(after)), after)
            parts.append((tokens(found), after, reports))
        if done < time:
            left = jax.tree.map(lambda leaf: leaf[:, done:], inputs)
            parts.append(self._one_stretch(left, state))
        reads, states, reports = zip(*parts, strict=True)
        join = lambda *leaves: jnp.concatenate(leaves, axis=1) if leaves[0].ndim > 1 else leaves[-1]  # noqa: E731
        # Tails were carried over the whole row, by `_shard_inputs`.
        local = tuple(one._replace(tails=old.tails) for one, old in zip(states[-1].local, state.local, strict=True))
        report = [jax.tree.map(join, *some) for some in zip(*reports, strict=True)]
        return jnp.concatenate(reads, axis=1), states[-1]._replace(local=local), report

    def _one_stretch(
        self,
        inputs: tuple[HeadInputs, ...],
        state: ShardState,
        shards: jax.Array | None = None,
        first: ShardStart | None = None,
    ) -> tuple[jax.Array, ShardState, list[Report]]:
        """The sum of the local memories' reads [b, t, h, d], the state after it, and a report of each.

        shards: for tokens that may reach into later shards, the number of every token's shard, int32 [t], 0 that of the
        state; first: what later shards begin with.
        """
        given, before = inputs[0], state.projection
        (P,), begin, resets = before.weights, None, None
        if shards is not None:
            begin = first.projection
            P = jnp.where(before.position == 0, begin[None], P)
            starts = jnp.diff(shards, prepend=jnp.zeros((1,), jnp.int32)) > 0
            starts = starts.at[0].set(before.position == 0)
            resets = jnp.broadcast_to(starts[None], given.queries.shape[:2])
        queries, P = key_projection(given.queries, given.keys, given.gates.mask, P, shards, begin)
        total, after, reports = 0.0, [], []
        for i, (local, given, before) in enumerate(zip(self.local, inputs, state.local, strict=True)):
            given = given._replace(queries=queries, resets=resets)
            if not self.writes:
                total += local.retrieve(before.memory.weights, queries)
                after.append(before)
                continue
            begin = None if first is None else broadcast(first.local[i].state(), len(queries))
            reads, now, surprise, _ = local._memorize(before.memory, given, begin, read_on=True)
            reports.append(memory_report(local.rule, local.params(), given.gates, given.values, surprise, now.weights))
            total += reads
            after.append(before._replace(memory=now))
        projection = dataclasses.replace(state.projection, weights=(P,))
        return total, ShardState(projection, tuple(after)), reports


def is_memory(node: Any) -> bool:
    """Whether a node of a state is one memory's."""
    return isinstance(node, memory.MemoryState)


def without_positions(state: Any) -> Any:
    """A state whose leaves all have a batch axis."""
    return jax.tree.map(
        lambda node: dataclasses.replace(node, position=None) if is_memory(node) else node, state, is_leaf=is_memory
    )


def with_positions(state: Any, other: Any) -> Any:
    """A state with the positions of another one."""
    return jax.tree.map(
        lambda node, known: dataclasses.replace(node, position=known.position) if is_memory(node) else node,
        state,
        other,
        is_leaf=is_memory,
    )


def as_arrays(state: Any) -> Any:
    """A state whose positions are arrays, as streaming carries them."""
    return jax.tree.map(
        lambda node: (
            dataclasses.replace(node, position=jnp.asarray(node.position, jnp.int32)) if is_memory(node) else node
        ),
        state,
        is_leaf=is_memory,
    )
