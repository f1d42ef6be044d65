"""Sharding: one mesh, one table of logical axes, and two annotations that do nothing while no mesh is set.

    with sharding.use_mesh(sharding.make_mesh(data=2, fsdp=4)):
        model = LanguageModel(config.model, rngs=nnx.Rngs(0))        # parameters are born sharded

Parameters name logical axes, which `RULES` maps to mesh axes; activations name mesh axes.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from jax.experimental import mesh_utils
from jax.nn.initializers import Initializer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

AXES = ("slice", "data", "fsdp", "tensor")
"""slice: copies of the model on slices that only the data center's network joins; data: copies inside a slice; fsdp:
shards of parameters; tensor: shards of heads and hidden widths."""

BATCH = ("slice", "data", "fsdp")
"""Mesh axes over which the rows of a batch are spread."""

COPIES = ("slice", "data")
"""Mesh axes over which there are copies of the parameters."""

HEADS = "tensor"
"""Mesh axis over which heads are spread, those of attention and of the memory alike."""

RULES = (("embed", "fsdp"), ("heads", HEADS), ("mlp", "tensor"), ("vocab", "tensor"), ("layers", None))
"""Logical parameter axis -> mesh axis (None: replicated)."""


def use_cores(rows: int) -> None:
    """On a machine without accelerator, make one device per core, as many as divide `rows`.

    XLA runs the small matrix products of a memory on one thread; rows on devices of their own use every core. Does
    nothing once jax has started, where XLA_FLAGS or jax_num_cpu_devices says how many devices there are, where there is
    an accelerator, and with several processes, whose machines may have different numbers of cores.
    """
    said = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if said or jax.config.jax_num_cpu_devices > 0 or jax.distributed.is_initialized():
        return
    with contextlib.suppress(RuntimeError):  # jax has started
        jax.config.update("jax_num_cpu_devices", math.gcd(rows, cores()))


def cores() -> int:
    """How many cores this process may run on: a container or a job scheduler may leave it fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """The number and kind of the devices, for a heading."""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, slice: int = 1, devices: list[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """A mesh with axes slice, data, fsdp and tensor over all devices, or over those given.

    Args:
      data, fsdp, tensor, slice: devices along each axis; one of them may be -1, "all that are left".
      devices: the devices to use, default `jax.devices()`. Those of one TPU slice get the same index on axis slice.

    Raises:
      ValueError: the axes do not multiply to the number of devices, or slice is not the number of TPU slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [slice, data, fsdp, tensor]
    if -1 in sizes:
        known = -math.prod(sizes)
        sizes[sizes.index(-1)] = len(devices) // max(known, 1)
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh data={data}, fsdp={fsdp}, tensor={tensor}, slice={slice} does not fit {len(devices)} devices; use "
            f"axes whose product is {len(devices)}, or -1 for one of them"
        )
    # Auto, not make_mesh's default Explicit: the compiler places what is not annotated.
    types = (AxisType.Auto,) * len(AXES)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    # An axis may be a part of an axis of the torus: 2 of 4 x 4 chips.
    split = {"allow_split_physical_axes": True}
    if slices == 1:  # slice > 1 here only rehearses the axis, without the network
        ordered = mesh_utils.create_device_mesh(sizes, devices, **split)
    elif sizes[0] != slices:
        raise ValueError(f"mesh slice={sizes[0]} does not fit devices in {slices} slices; use slice={slices}")
    else:
        ordered = mesh_utils.create_hybrid_device_mesh([1, *sizes[1:]], [slices, 1, 1, 1], devices, **split)
    return jax.sharding.Mesh(ordered, AXES, axis_types=types)


@contextlib.contextmanager
def use_mesh(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Make `logical` and `constrain` annotate for this mesh inside the `with` block."""
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        yield


def spread(rows: Any, rest: Any) -> tuple[Any, Any]:
    """`rows` (leaves [batch, ...]) shared out over all devices, `rest` on every one of them."""
    mesh = make_mesh()
    place = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))  # noqa: E731
    return place(rows, PartitionSpec(BATCH)), place(rest, PartitionSpec())


def logical(init: Initializer, *axes: str | None) -> Initializer:
    """`init` whose array carries these logical axes, one name of `RULES` or None per dimension."""
    return init if jax.sharding.get_abstract_mesh().empty else nnx.with_partitioning(init, axes)


def wide_sides(shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """Logical axes of the matrices [heads, rows, columns] that memories start from: "heads", and "embed" for the wider
    side, as for the residual stream's width, if the number of fsdp shards divides it."""
    names: list[str | None] = ["heads"] + [None] * (len(shape) - 1)
    widest = max(range(1, len(shape)), key=lambda side: shape[side])
    if shape[widest] % jax.sharding.get_abstract_mesh().shape.get("fsdp", 1) == 0:
        names[widest] = "embed"
    return tuple(names)


def batch_axes(rows: int) -> tuple[str, ...] | None:
    """The mesh axes over which a batch of `rows` rows is spread, None if their devices do not divide it evenly."""
    return _spread_by_compiler(BATCH) if rows % _batch_devices() == 0 else None


def batch_shards(rows: int) -> int:
    """Into how many parts a batch of `rows` rows is spread: 1 while no mesh is set, or where it does not divide."""
    return _batch_devices() if batch_axes(rows) else 1


def _batch_devices() -> int:
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in _spread_by_compiler(BATCH))


def head_shards() -> int:
    """The number of devices over which a row's heads are spread, 1 while no mesh is set."""
    return jax.sharding.get_abstract_mesh().shape.get(HEADS, 1)


def on_devices(function: Callable[..., Any], in_specs: tuple, out_specs: Any) -> Callable[..., Any]:
    """`function` on every device for its own part, as the compiler cannot divide a kernel; `function` itself without a
    mesh.

    Args:
      in_specs, out_specs: trees of PartitionSpec, as `jax.shard_map` takes them.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function

    def without_copies(specs: Any) -> Any:
        known = lambda spec: PartitionSpec(*map(_spread_by_compiler, spec))  # noqa: E731
        return jax.tree.map(known, specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))

    # A Pallas call does not say over which axes its output varies.
    return jax.shard_map(
        function, in_specs=without_copies(in_specs), out_specs=without_copies(out_specs), check_vma=False
    )


def add_over_copies(function: Callable[[Any, Any], Any], params: Any, rows: Any) -> Any:
    """The sum of function(params, rows) over the copies of the parameters, each with its own rows.

    The copies send each other only this sum, once, however often `function` itself adds up; left to itself, the
    compiler would send every partial sum. Inside `function`, the compiler spreads over the other axes only.

    Args:
      rows: leaves [batch, ...], in as many equal parts as there are copies.
    """
    axes = _several(COPIES)
    if not axes:
        return function(params, rows)
    return jax.shard_map(
        lambda params, rows: jax.lax.psum(function(params, rows), axes),
        in_specs=(PartitionSpec(), PartitionSpec(axes)),
        out_specs=PartitionSpec(),
        axis_names=set(axes),
        check_vma=False,
    )(params, rows)


def on_own_rows(function: Callable[[Any, Any], Any], shared: Any, rows: Any) -> Any:
    """function(shared, rows), on every device for its own rows.

    What all rows share is gathered once, and its gradients are added up over devices once, however often `function`
    uses it: left to itself, the compiler would do both in every turn of a scan. Where heads are spread over devices
    too, it is left to itself, as it would otherwise send half as much again between those (tpu/schedule.md, MAC).

    Args:
      shared: leaves that are no rows, such as parameters. rows: leaves [batch, ...].
    Returns:
      What `function` returns, leaves [batch, ...].
    """
    axes = _several(batch_axes(jax.tree.leaves(rows)[0].shape[0]) or ())
    if not axes or head_shards() > 1:
        return function(shared, rows)
    spec = PartitionSpec(axes)
    return jax.shard_map(
        function, in_specs=(PartitionSpec(), spec), out_specs=spec, axis_names=set(axes), check_vma=False
    )(shared, rows)


def _several(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of these mesh axes that have several devices."""
    shape = jax.sharding.get_abstract_mesh().shape
    return tuple(axis for axis in axes if shape.get(axis, 1) > 1)


def inside_a_copy() -> bool:
    """Whether this is traced by `add_over_copies`, for several copies."""
    return bool(set(COPIES).intersection(jax.sharding.get_abstract_mesh().manual_axes))


def _spread_by_compiler(axes: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    """These mesh axes without those of `add_over_copies`, over which a function already has its own part."""
    own = jax.sharding.get_abstract_mesh().manual_axes
    if isinstance(axes, tuple):
        return tuple(axis for axis in axes if axis not in own)
    return None if axes in own else axes


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """`x` constrained to be sharded over these mesh axes, one entry per dimension."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*map(_spread_by_compiler, axes)))


def replicate(tree: Any) -> Any:
    """Arrays held whole on every device, so that each of several processes can read them."""
    return jax.tree.map(lambda x: constrain(x, *[None] * x.ndim), tree)
