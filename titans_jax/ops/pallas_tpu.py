"""Arrays of many heads as the blocks that a Pallas TPU kernel takes of them, and trees of references to such blocks.

Leaves have an axis of n heads in front, of which several are taken at a time. A leaf of three axes, [n, rows,
columns], stays for all steps of a head; one of four, [n, chunks, rows, columns], is taken in groups of chunks, or, with
fewer parts than there are groups, part by part, each of which stays for as many groups; `SideBySide` is the layout of a
model's tokens.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from titans_jax.ops.platform import LANES, SUBLANES, target_platform

VMEM_SHARE = 0.8
"""Share of a core's VMEM that a kernel may use; the rest is the compiler's."""


class Steps(NamedTuple):
    """The grid: `rows` sequences of `heads` heads each, at most `most_heads` at a time, or fewer if VMEM holds fewer;
    for every head `groups` groups of `chunks` chunks. head_bytes: bytes of VMEM that a head's intermediate values take,
    beside its blocks."""

    rows: int
    heads: int
    most_heads: int
    chunks: int
    groups: int
    head_bytes: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SideBySide:
    """The heads of a sequence side by side, `array` [rows, chunks, tokens, heads * width]: the layout in which
    projections and norms fill all lanes, and which reaches the kernel without a copy."""

    array: Any
    width: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, x: jax.Array, heads: int) -> SideBySide:
        """From [n, chunks, tokens, width]."""
        n, chunks, tokens, width = x.shape
        x = jnp.moveaxis(x.reshape(-1, heads, chunks, tokens, width), 1, 3)
        return cls(x.reshape(n // heads, chunks, tokens, heads * width), width)

    def apart(self) -> jax.Array:
        """The inverse of `of`."""
        rows, chunks, tokens, _ = self.array.shape
        x = self.array.reshape(rows, chunks, tokens, -1, self.width)
        return jnp.moveaxis(x, 3, 1).reshape(-1, chunks, tokens, self.width)

    def astype(self, dtype) -> SideBySide:
        return SideBySide(self.array.astype(dtype), self.width)

    def load(self, chunk) -> jax.Array:
        """One chunk of all heads of a block of references, [n, tokens, width]."""
        x = self.array[:, chunk]
        heads = [x[..., i : i + self.width] for i in range(0, x.shape[-1], self.width)]
        return jnp.stack(heads, axis=1).reshape(-1, x.shape[1], self.width)

    def store(self, x: jax.Array, chunk) -> None:
        """The inverse of `load`."""
        heads = self.array.shape[-1] // self.width
        x = x.reshape(-1, heads, *x.shape[1:]).astype(self.array.dtype)
        self.array[:, chunk] = jnp.concatenate([x[:, i] for i in range(heads)], axis=-1)


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`, at least 1."""
    return max(d for d in range(1, max(most, 1) + 1) if n % d == 0)


def is_side_by_side(x) -> bool:
    """Whether an array is kept in the layout of a model's tokens."""
    return isinstance(x, SideBySide)


def call(kernel, name: str, steps: Steps, inputs: tuple, outputs: tuple, scratch: list, backwards: bool):
    """Run `kernel(*inputs, *outputs, *scratch)` on trees of references, over the grid.

    scratch: trees of shapes [n, ...] of what stays in VMEM from one step to the next.
    """
    parts = [jax.tree.flatten(tree, is_leaf=is_side_by_side) for tree in (inputs, outputs, scratch)]
    (inputs, _), (outputs, structure), (scratch, _) = parts
    vmem = usable_vmem()
    widths = {x.width for x in inputs + outputs if is_side_by_side(x)}

    def bytes_with(buffers: int) -> int:
        """A head's bytes. buffers: of each array whose blocks stay for several steps; all others have two."""
        blocks = sum((buffers if stays(x, steps) else 2) * bytes_of_head(x, steps) for x in inputs + outputs)
        return steps.head_bytes + blocks + sum(tiled_bytes(x.shape[1:], x.dtype) for x in scratch)

    # A second buffer hides the fetch of the next heads' matrices, once a sequence: where two do not fit, there is one.
    buffers = 2 if heads_of_step(steps, widths, 0) * bytes_with(2) <= vmem else 1
    heads = heads_of_step(steps, widths, min(steps.most_heads, int(vmem / bytes_with(buffers))))
    across = max(steps.heads // heads, 1)  # steps that a sequence's heads take

    def spec(x):
        group = (lambda g: steps.groups - 1 - g) if backwards else (lambda g: g)
        if not is_side_by_side(x):
            turns = max(1, steps.groups // x.shape[1])
            place = (lambda i, g: (i, 0, 0)) if x.ndim == 3 else (lambda i, g: (i, group(g) // turns, 0, 0))
            mode = pl.Buffered(1) if buffers == 1 and stays(x, steps) else None
            return pl.BlockSpec((heads, *part_of_head(x, steps)), place, pipeline_mode=mode)
        rows, chunks, tokens, lanes = x.array.shape
        block = (heads * across // steps.heads, chunks // steps.groups, tokens, lanes // across)
        return pl.BlockSpec(block, lambda i, g: (i // across, group(g), 0, i % across))

    def flat_kernel(*references):
        trees, references = [], iter(references)
        for leaves, treedef in parts:
            trees += treedef.unflatten([same_layout(x, next(references)) for x in leaves])
        kernel(*trees)

    found = pl.pallas_call(
        flat_kernel,
        grid=(steps.rows * steps.heads // heads, steps.groups),
        in_specs=[spec(x) for x in inputs],
        out_specs=[spec(x) for x in outputs],
        out_shape=[x.array if is_side_by_side(x) else x for x in outputs],
        scratch_shapes=[pltpu.VMEM((heads, *x.shape[1:]), x.dtype) for x in scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem),
        interpret=interpreted(),
        name=name,
    )(*[x.array if is_side_by_side(x) else x for x in inputs])
    return structure.unflatten(map(same_layout, outputs, found))


def stays(x, steps: Steps) -> bool:
    """Whether a block of an array is for several groups of chunks, or for all of a head."""
    return not is_side_by_side(x) and (x.ndim == 3 or x.shape[1] < steps.groups)


def same_layout(like, array):
    """An array, or a reference, in the layout of another."""
    return SideBySide(array, like.width) if is_side_by_side(like) else array


def heads_of_step(steps: Steps, widths: set[int], most: int) -> int:
    """How many heads a step takes: some heads of one sequence, which fill whole registers, or all of some sequences."""
    parts = [h for h in range(1, steps.heads) if steps.heads % h == 0 and all(h * w % LANES == 0 for w in widths)]
    whole = [steps.heads * rows for rows in range(1, steps.rows + 1) if steps.rows % rows == 0]
    return max((h for h in parts + whole if h <= most), default=(parts + whole)[0])


def part_of_head(x, steps: Steps) -> tuple[int, ...]:
    """The shape of a head's part of a block, of an array that is not side by side."""
    return x.shape[1:] if x.ndim == 3 else (max(1, x.shape[1] // steps.groups), *x.shape[2:])


def bytes_of_head(x, steps: Steps) -> int:
    """Bytes of a head's part of a block in VMEM."""
    if is_side_by_side(x):
        _, chunks, *tokens = x.array.shape
        return tiled_bytes((chunks // steps.groups, *tokens), x.array.dtype) // steps.heads
    return tiled_bytes(part_of_head(x, steps), x.dtype)


def tiled_bytes(shape: tuple[int, ...], dtype) -> int:
    """Bytes of an array in VMEM, where its last two axes are whole tiles."""
    *rest, rows, columns = shape
    tiles = -(-rows // SUBLANES) * -(-columns // LANES)
    return math.prod(rest) * tiles * SUBLANES * LANES * jnp.dtype(dtype).itemsize


def interpreted() -> bool:
    """Whether kernels are interpreted: the target has no compiler for them."""
    return target_platform() != "tpu"


def usable_vmem() -> int:
    """Bytes of VMEM that a kernel may use on a core of the target; where that is no TPU, 128 MiB stand for its VMEM."""
    return int(VMEM_SHARE * (pltpu.get_tpu_info().vmem_capacity_bytes if target_platform() == "tpu" else 128 * 2**20))


# Trees of references


def read(references, *chunk):
    """The values of all heads, at one chunk."""

    def load(ref):
        return ref.load(*chunk) if is_side_by_side(ref) else ref[(slice(None), *chunk)]

    return jax.tree.map(load, references, is_leaf=is_side_by_side)


def read_wide(references):
    """Whole references as float32."""
    return jax.tree.map(lambda ref: ref[...].astype(jnp.float32), references)


def write(references, values, *chunk):
    """Store values of all heads, at one chunk."""

    def store(ref, x):
        if is_side_by_side(ref):
            ref.store(x, *chunk)
        else:
            ref[(slice(None), *chunk)] = x.astype(ref.dtype)

    jax.tree.map(store, references, values, is_leaf=is_side_by_side)


def copy(source, target):
    """Store all of one tree of references in another."""

    def store(a, b):
        b[...] = a[...]

    jax.tree.map(store, source, target)


def clear(references):
    """Store zeros."""

    def store(ref):
        ref[...] = jnp.zeros(ref.shape, ref.dtype)

    jax.tree.map(store, references)
