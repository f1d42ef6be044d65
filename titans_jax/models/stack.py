"""The parts of every model: a stack of blocks, and a head that defines input, output and loss.

    @register_head()
    class Classifier(TokenStack):
        def __init__(self, config, classes=2, *, rngs): ...
        def __call__(self, tokens, segment_ids=None): ...
        def loss_sum(self, batch): ...                      # -> summed loss, what it is divided by

`ModelConfig.head` names one, with its arguments: "classifier(classes=3)". Whatever the head, the blocks, the optimizer,
the training step and the rules of sharding are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from titans_jax import sharding
from titans_jax.config import ModelConfig, read_call, registered
from titans_jax.config.arguments import check_arguments, parameters_of
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.head_reads import READS
from titans_jax.layers.norms import RMSNorm
from titans_jax.layers.projections import INIT_STDDEV, compute_dtype, param_dtype
from titans_jax.models.pattern import blocks_of
from titans_jax.registry import Registry

NAMES = ("features", "reads", READS)
"""Activations that layers name: queries, keys and values of attention and memory, and what these return."""

REMAT_POLICIES = {
    "full": jax.checkpoint_policies.save_only_these_names(READS),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names(*NAMES),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(NAMES),
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


class Cycle(nnx.Module):
    """The blocks of one round of the pattern."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.blocks = nnx.List([block(config, rngs=rngs) for block in blocks_of(config)])


class BlockStack(nnx.Module):
    """The pattern of blocks cycled over the depth, and the norm after it. A head is a subclass.

    Args:
      config: the model; see `titans_jax.config.ModelConfig`.
      rngs: the parameters' random numbers, nnx.Rngs(seed).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        # Layers are stacked, so that one compiled body runs them all: every parameter gains a leading "layers" axis.
        cycles = config.depth // len(config.pattern)
        make = nnx.transform_metadata(lambda rngs: Cycle(config, rngs=rngs), in_axes=0, out_axes=0, partition="layers")
        self.cycles = nnx.vmap(make)(rngs.split(cycles))
        self.norm = RMSNorm(config, config.dim, rngs=rngs)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """The output of the head."""
        raise NotImplementedError

    def loss_sum(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The summed loss of a batch, and what it is divided by, scalars."""
        raise NotImplementedError

    def unrolled(self) -> BlockStack:
        """The same model with every layer's parameters apart, whose blocks run one after another and not in a scan.

        It reads on from states, which are lists as `cycles_apart` makes them, and is not for whole sequences.
        """
        model = nnx.merge(*nnx.split(self))
        model.cycles = nnx.List(cycles_apart(self.cycles))
        return model

    def init_state(self, batch_size: int, max_length: int | None = None) -> Any:
        """The state before the first token: a pytree of arrays whose sizes do not change while it reads.

        Args:
          batch_size: rows.
          max_length: tokens to make room for. Only full attention, whose cache is this long, and kept memories
            (`MemoryConfig.caching`), one for every segment or every doubling of their number, need it.

        Raises:
          ValueError: something needs it and max_length is None.
        """

        def one_cycle(cycle: Cycle) -> tuple:
            return tuple(block.init_state(batch_size, max_length) for block in cycle.blocks)

        if isinstance(self.cycles, nnx.List):
            return [one_cycle(cycle) for cycle in self.cycles]
        return jax.vmap(one_cycle)(self.cycles)

    def _blocks(
        self, x: jax.Array, states: Any, documents: Documents | None, select: Callable, closed: bool = False
    ) -> tuple[jax.Array, Any]:
        """Run all blocks. Returns x, and `select(states, reports)` of each cycle's blocks, stacked over cycles."""

        def one_cycle(x: jax.Array, cycle_and_states: tuple[Cycle, Any]) -> tuple[jax.Array, Any]:
            cycle, states = cycle_and_states
            after, reports = [], []
            for number, block in enumerate(cycle.blocks):
                state = None if states is None else states[number]
                x, state, report = block(x, block.closed(state) if closed else state, documents)
                x = sharding.constrain(x, sharding.BATCH, None, None)
                after.append(state)
                reports.append(report)
            return x, select(tuple(after), tuple(reports))

        if self.config.remat != "none":
            policy = REMAT_POLICIES[self.config.remat]
            one_cycle = jax.checkpoint(one_cycle, prevent_cse=False, policy=policy)
        if not isinstance(self.cycles, nnx.List):
            return jax.lax.scan(one_cycle, x, (self.cycles, states))
        found = []
        for cycle_and_states in zip(self.cycles, states, strict=True):
            x, selected = one_cycle(x, cycle_and_states)
            found.append(selected)
        return x, found

    def _read(self, x: jax.Array) -> jax.Array:
        """[batch, time, dim] through all blocks and the norm, each row a document of its own."""
        x, _ = self._blocks(x, None, None, lambda *_: ())
        return self.norm(x)


def cycles_apart(stacked: Any, axis: int = 0) -> list[Any]:
    """What is stacked along a leading axis of cycles, or along another axis, as a list with an element a cycle."""
    leaves, structure = jax.tree.flatten(stacked)
    apart = zip(*(jnp.unstack(leaf, axis=axis) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(structure, one) for one in apart]


class TokenStack(BlockStack):
    """A stack that reads tokens, through an embedding."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        table = sharding.logical(initializers.normal(INIT_STDDEV), "vocab", "embed")
        self.embedding = nnx.Embed(
            config.vocab_size,
            config.dim,
            dtype=compute_dtype(config),
            param_dtype=param_dtype(config),
            embedding_init=table,
            rngs=rngs,
        )
        super().__init__(config, rngs=rngs)

    def _embed(self, tokens: jax.Array) -> jax.Array:
        if sharding.inside_a_copy():
            # XLA's partitioner (jax 0.10.2) fails there where fsdp would turn from the table's width to the tokens'
            # rows.
            table = sharding.constrain(self.embedding.embedding[...], "tensor", None)
            x = jnp.take(table.astype(self.embedding.dtype), tokens, axis=0)
        else:
            x = self.embedding(tokens)
        return sharding.constrain(x * jnp.asarray(self.config.embedding_scale, x.dtype), sharding.BATCH, None, None)


HEADS: Registry[type[BlockStack]] = Registry("head")
"""Heads by name."""

register_head: Callable[..., Callable[[type[BlockStack]], type[BlockStack]]] = HEADS.register

LANGUAGE_MODEL = "language_model"
"""The head that predicts next tokens; `titans train` and everything but studies uses it."""


def head_of(config: ModelConfig) -> tuple[type[BlockStack], dict[str, Any]]:
    """The head that a configuration names, and its arguments.

    Raises:
      ConfigError: there is no such head, or it takes no such argument.
    """
    name, arguments = read_call("model.head", config.head)
    head = registered(HEADS, "model.head", name)
    own = dict(list(parameters_of(head.__init__).items())[2:-1])  # without self, config and rngs
    check_arguments("model.head", config.head, own, arguments)
    return head, arguments


def make_model(config: ModelConfig, *, rngs: nnx.Rngs) -> BlockStack:
    """The model of a configuration: its blocks under its head; raises as `head_of`."""
    head, arguments = head_of(config)
    return head(config, **arguments, rngs=rngs)


def empty_state(graphdef: nnx.GraphDef, params: Any, batch_size: int, max_length: int | None = None) -> Any:
    """`BlockStack.init_state` of a model that is taken apart, with its parameters as an argument for `jax.jit`."""
    return nnx.merge(graphdef, params).init_state(batch_size, max_length)
