"""A model as steps of one token run it: its layers one after another, so that slices of stacked weights and states need
not be copied at every step.

    parts = decoding_parts(graphdef, params)
    state = cycles_apart(state)                                 # of `models`, after a prompt was read
    logits, state = decode_step(decoding_model(*parts), token, state)
"""

from typing import Any

import jax
from flax import nnx


def decoding_parts(graphdef: nnx.GraphDef, params: Any) -> tuple[jax.tree_util.PyTreeDef, list[jax.Array]]:
    """The model (graphdef, params) as its structure and its arrays: a call takes a list of arrays faster than a module.

    On CPUs every layer's weights are arrays of their own, a second copy. On accelerators, whose memory is scarcer and
    whose products read a slice where it lies, they stay stacked.
    """
    model = nnx.merge(graphdef, params)
    leaves, structure = jax.tree.flatten(_unrolled(model) if jax.default_backend() == "cpu" else model)
    return structure, leaves


def decoding_model(structure: jax.tree_util.PyTreeDef, leaves: list[jax.Array]) -> nnx.Module:
    """The model of `decoding_parts`, unrolled, inside a jit for which `structure` is static."""
    return jax.tree.unflatten(structure, leaves).unrolled()


@jax.jit
def _unrolled(model: nnx.Module) -> nnx.Module:
    return model.unrolled()
