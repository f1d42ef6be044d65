"""The mesh of a configuration, over this machine's devices or given ones, checked before anything is compiled."""

import contextlib
import math
from collections.abc import Iterator

import jax
from jax.sharding import NamedSharding, PartitionSpec

from titans_jax import sharding
from titans_jax.config import Config, ConfigError, DataConfig, MeshConfig
from titans_jax.layers.feed_forward import hidden_width
from titans_jax.models.loss import Batch


def mesh_of(config: Config, devices: list[jax.Device] | None = None) -> jax.sharding.Mesh:
    """The mesh that config.mesh describes, over all devices or those given.

    Raises:
      ConfigError: the axes do not multiply to the devices, or do not divide the model or the batch.
    """
    axes = config.mesh
    try:
        mesh = sharding.make_mesh(axes.data, axes.fsdp, axes.tensor, axes.slice, devices)
    except (ValueError, NotImplementedError) as error:  # the latter: no way to lay the axes out on the torus
        raise ConfigError(str(error).splitlines()[0]) from error
    model, shards = config.model, mesh.shape
    _divides("tensor", shards["tensor"], "model.num_heads", model.num_heads)
    _divides("tensor", shards["tensor"], "model.vocab_size", model.vocab_size)
    _divides("tensor", shards["tensor"], "the hidden width of the feed-forward layer", hidden_width(model))
    _divides("fsdp", shards["fsdp"], "model.dim", model.dim)
    accumulation = config.training.gradient_accumulation
    rows = math.prod(shards[axis] for axis in sharding.BATCH)
    if config.data.batch_size % (rows * accumulation):
        raise ConfigError(
            f"data.batch_size is {config.data.batch_size}, cut into {accumulation} by training.gradient_accumulation "
            f"and shared by {rows} devices (mesh slice x data x fsdp); use "
            f"{_fitting(config, rows, shards['tensor'])}"
        )
    return mesh


def _fitting(config: Config, rows: int, tensor: int) -> str:
    """What to use where `rows` devices cannot share the rows of a microbatch, in words: what leaves the batch as it is,
    if there is that, before another batch."""
    batch, accumulation = config.data.batch_size, config.training.gradient_accumulation
    if cuts := [cut for cut in range(accumulation, 0, -1) if batch % (rows * cut) == 0]:
        return f"training.gradient_accumulation {cuts[0]}"
    works = max(round(batch / (rows * accumulation)), 1) * rows * accumulation
    larger = f"a multiple of {rows * accumulation}, such as {works}"
    tensor = tensor * rows // batch
    if rows % batch or config.model.num_heads % tensor:
        return larger
    return f"mesh.tensor {tensor} and training.gradient_accumulation 1, or {larger}"


def _divides(axis: str, shards: int, name: str, value: int) -> None:
    if value % shards:
        works = max(n for n in range(1, shards) if value % n == 0)
        raise ConfigError(f"{name} is {value}, which mesh.{axis} {shards} does not divide; use mesh.{axis} {works}")


@contextlib.contextmanager
def use_mesh(config: Config) -> Iterator[jax.sharding.Mesh | None]:
    """Inside the `with` block the mesh over all devices is set; on a single device none is set, and it is None.

    Raises:
      ConfigError: see `mesh_of`.
    """
    mesh = mesh_of(config)
    if mesh.size == 1:
        yield None
    else:
        with sharding.use_mesh(mesh):
            yield mesh


def use_cores(config: Config) -> None:
    """One CPU device per core for the rows of a configuration that leaves the mesh open (`sharding.use_cores`)."""
    if config.mesh == MeshConfig():
        with contextlib.suppress(TypeError, ZeroDivisionError):  # which `validate` refuses in a sentence
            sharding.use_cores(config.data.batch_size // config.training.gradient_accumulation)


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """The sharding of every array of a batch: its rows over the mesh axes `sharding.BATCH`."""
    return NamedSharding(mesh, PartitionSpec(sharding.BATCH))


def to_devices(config: DataConfig, mesh: jax.sharding.Mesh | None, batch: Batch) -> Batch:
    """This process's rows as a batch sharded over the mesh; without a mesh, the batch unchanged."""
    if mesh is None:
        return batch
    place, shape = batch_sharding(mesh), (config.batch_size, config.sequence_length)
    return {name: jax.make_array_from_process_local_data(place, rows, shape) for name, rows in batch.items()}
