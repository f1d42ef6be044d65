"""Rows of unequal length side by side: states whose rows have each read a different length, or are copies of others.

A model's state has one count, for all rows, of how much has been read. `separate` gives every row a count of its own;
such a state can only be used by a `jax.vmap` of `decode_step` over single rows. Long texts are read before that,
together.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from titans_jax import sharding
from titans_jax.models import empty_state

FREE = PartitionSpec.UNCONSTRAINED
"""A dimension whose place on the mesh the compiler chooses."""


class RowStates:
    """States of models of one structure, with any blocks: only the arrays of a state are looked at.

    Args:
      graphdef: the structure of a titans_jax.models.LanguageModel.
    """

    def __init__(self, graphdef: nnx.GraphDef) -> None:
        self._graphdef = graphdef
        self._axes: list[int | None] | None = None
        self.empty = jax.jit(self._empty, static_argnums=(1, 2))
        """(params, rows, length) -> the state of `rows` rows before the first token, with room for `length` tokens."""

    def separate(self, params: Any, state: Any) -> Any:
        """Every row as a state of one row with a count of its own: all leaves [rows, ...]. For use inside a jit."""
        axes, leaves = self._batch_axes(params), jax.tree.leaves(state)
        rows = next(leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True) if axis is not None)

        def apart(leaf: jax.Array, axis: int | None) -> jax.Array:
            if axis is None:
                return jnp.broadcast_to(leaf, (rows, *leaf.shape))
            return jnp.expand_dims(jnp.moveaxis(leaf, axis, 0), axis + 1)

        parts = [apart(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(state), parts)

    def copy(self, params: Any, state: Any, rows: jax.Array) -> Any:
        """The state whose row i is row rows[i], int [any], of `state`. For use inside a jit."""
        parts = [
            leaf if axis is None else jnp.take(leaf, rows, axis=axis)
            for leaf, axis in zip(jax.tree.leaves(state), self._batch_axes(params), strict=True)
        ]
        return self.spread(params, jax.tree.unflatten(jax.tree.structure(state), parts))

    def spread(self, params: Any, state: Any) -> Any:
        """The state with its rows shared out over the mesh, where one is set and its devices divide the rows.

        For use inside a jit: otherwise the compiler would choose the sharding of the result, and the next function
        would be compiled once more for it.
        """
        axes = self._batch_axes(params)

        def place(leaf: jax.Array, axis: int | None) -> jax.Array:
            if axis is None:
                return sharding.replicate(leaf)
            rows = sharding.batch_axes(leaf.shape[axis])
            return sharding.constrain(leaf, *[rows if number == axis else FREE for number in range(leaf.ndim)])

        parts = [place(leaf, axis) for leaf, axis in zip(jax.tree.leaves(state), axes, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(state), parts)

    def _empty(self, params: Any, rows: int, length: int) -> Any:
        return self.spread(params, empty_state(self._graphdef, params, rows, length))

    def _batch_axes(self, params: Any) -> list[int | None]:
        """For every leaf of a state, the axis that is the rows', or None where it has none."""
        if self._axes is None:
            two, three = (
                jax.tree.leaves(jax.eval_shape(lambda params, n=n: empty_state(self._graphdef, params, n, 8), params))
                for n in (2, 3)
            )
            self._axes = [
                next((axis for axis, size in enumerate(one.shape) if size != other.shape[axis]), None)
                for one, other in zip(two, three, strict=True)
            ]
        return self._axes
