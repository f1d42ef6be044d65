"""A model and its state as steps of one token run them.

    structure, leaves = decoding_parts(graphdef, params)
    state = decoding_state(state)                                        # of a model that has read the prompt
    logits, state = decode_step(jax.tree.unflatten(structure, leaves), token, state)

The last line stands in a jit for which the structure is static.
"""

from typing import Any

import jax
from flax import nnx

from titans_jax.models import cycles_apart


def unrolls() -> bool:
    """Whether decoding runs layers one after another: on CPUs, where a scan copies a layer's slices of stacked weights
    and states at every step. Elsewhere layers stay in a scan: it compiles faster, and needs no second copy of the
    weights."""
    return jax.default_backend() == "cpu"


def decoding_parts(graphdef: nnx.GraphDef, params: Any) -> tuple[jax.tree_util.PyTreeDef, list[jax.Array]]:
    """The model (graphdef, params), unrolled where decoding does so, as its structure and its arrays: a call takes a
    list of arrays faster than a module."""
    model = nnx.merge(graphdef, params)
    leaves, structure = jax.tree.flatten(_unrolled(model) if unrolls() else model)
    return structure, leaves


def decoding_state(state: Any, axis: int = 0) -> Any:
    """A model's state as the model of `decoding_parts` takes it; layers are stacked along its leaves' axis `axis`."""
    return cycles_apart(state, axis) if unrolls() else state


@jax.jit
def _unrolled(model: nnx.Module) -> nnx.Module:
    return model.unrolled()
