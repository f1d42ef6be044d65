"""A model whose memories are read and never written: the control that measures what writing is worth."""

import jax
from flax import nnx

from titans_jax.layers.head_reads import MemoryLayer


def without_writes(graphdef: nnx.GraphDef) -> nnx.GraphDef:
    """The same model, with the same parameters, whose memories stay at their start (`MemoryLayer.writes`).

    It is for `nnx.merge(without_writes(graphdef), params)`, in training, prefill and decoding alike. A model without
    memory comes back as it is.
    """
    model = nnx.graph.unflatten(graphdef, [jax.ShapeDtypeStruct((), "float32")] * graphdef.num_leaves)
    for _, module in nnx.iter_graph(model):
        if isinstance(module, MemoryLayer):
            module.writes = False
    return nnx.graphdef(model)
