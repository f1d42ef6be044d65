"""The train step compiled for TPUs: whether it fits, its traffic over the network, and its estimated time.

    report = compile_step(config, find_topology("v5e:2x4"))

Nothing is computed and no array is made: the step is compiled for described devices. The content of a chip's memory and
the collectives are exact; the step's time is the compiler's estimate.
"""

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from titans_jax import sharding
from titans_jax.config import Config, ConfigError
from titans_jax.models import training_flops_per_token
from titans_jax.ops.chips import GIB
from titans_jax.tpu.hlo import Collective, Program
from titans_jax.tpu.schedules import Kernels, compiling, kernel_cycles
from titans_jax.tpu.topology import Topology, describe
from titans_jax.training.mesh import mesh_of
from titans_jax.training.optimizer import make_optimizer
from titans_jax.training.run import abstract_model
from titans_jax.training.step import step_of


class DoesNotFit(ConfigError):
    """The step needs more memory than a chip has; `used`: the least bytes that it needs on a device."""

    def __init__(self, sentence: str, used: float):
        super().__init__(sentence)
        self.used = used


@dataclass(frozen=True)
class Report:
    """The compiler's report of one training step. Bytes, operations and tokens are per chip."""

    topology: Topology
    mesh: dict[str, int]
    rows: int
    """Rows of a step, over all chips."""
    sequence_length: int
    accumulation: int
    remat: str
    compile_seconds: float
    hbm: dict[str, float]
    """Bytes of a chip's memory, by kind of content."""
    host: float
    """Bytes of the host's memory that activations of remat `offload` take."""
    flops: float
    """Operations of a step, counted analytically, without those that rematerialisation repeats."""
    cycles: Counter[str]
    """Estimated cycles of a step by source file; those of Pallas kernels by `kernel` and their name."""
    kernels: Kernels
    collectives: list[Collective]
    """The collectives of one device in a step."""
    unknown_loops: int
    """Loops whose number of turns is not known."""

    @property
    def headroom(self) -> float:
        """Bytes of a chip that the step leaves free."""
        return self.topology.generation.hbm - sum(self.hbm.values())

    @property
    def kernel_share(self) -> float:
        """The share of the cycles that Pallas kernels take."""
        return self.kernels.cycles.total() / self.cycles.total()

    @property
    def step_seconds(self) -> float:
        """Estimated seconds of a step: those of the compiler's cycles, as if nothing else took time."""
        return self.cycles.total() / self.topology.generation.clock

    @property
    def utilisation(self) -> float:
        """Estimated model FLOPs utilisation."""
        return self.flops / self.step_seconds / self.topology.generation.peak_flops

    @property
    def tokens_per_second(self) -> float:
        """Estimated tokens per second of a chip."""
        return self.rows * self.sequence_length / self.topology.chips / self.step_seconds

    @property
    def network_seconds(self) -> dict[str, float]:
        """By mesh axes inside a slice: the least time of a step's collectives, as if on all links of a chip at once."""
        found: Counter[str] = Counter()
        for collective in self.collectives:
            if "slice" not in collective.axes:
                devices = self.topology.generation.devices
                found["+".join(collective.axes)] += collective.sent * devices / self.topology.generation.ici
        return dict(found)

    @property
    def includes(self) -> list[str]:
        """How the estimate counts Pallas kernels: mostly as an upper bound."""
        if not self.kernels.scheduled:
            return []
        generation = self.topology.generation
        found = [
            "every step of a Pallas kernel's grid with all of its scheduled cycles",
            "all of a kernel's cycles as often as the longest loop in it turns",
        ]
        if any(name.startswith("splash") for name in self.kernels.cycles):
            found.append("steps of full causal attention above the diagonal as none")
        if generation.counted > generation.devices:
            found.append("Pallas kernels as on one of a device's two cores")
        return found

    @property
    def leaves_out(self) -> list[str]:
        """What the estimate of the step's time leaves out."""
        found = ["collectives, as if all were hidden", "copies between memories that nothing hides", "the host"]
        if self.kernels.scheduled:
            found.append("what Pallas kernels wait for memory, as if their copies were hidden")
        if self.kernels.calls > self.kernels.scheduled:
            found.append(f"{self.kernels.calls - self.kernels.scheduled:,} calls of Pallas kernels without a schedule")
        if self.unknown_loops:
            found.append(f"all turns but one of {self.unknown_loops} loops of unknown length")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values; bytes, seconds, operations."""
        topology = {"name": self.topology.name, "ordered_as": self.topology.ordered_as}
        return {
            "topology": topology | {"slices": self.topology.slices, "chips": self.topology.chips},
            "mesh": self.mesh,
            "rows": self.rows,
            "sequence_length": self.sequence_length,
            "gradient_accumulation": self.accumulation,
            "remat": self.remat,
            "compile_seconds": self.compile_seconds,
            "hbm": self.hbm | {"headroom": self.headroom},
            "host": self.host,
            "flops": self.flops,
            "collectives": [dataclasses.asdict(collective) for collective in self.collectives],
            "network_seconds": self.network_seconds,
            # Python 3.11's asdict makes a Counter of a Counter's pairs.
            "kernels": vars(self.kernels) | {"cycles": dict(self.kernels.cycles)},
            "estimate": {
                "cycles": self.cycles.total(),
                "cycles_by_source": dict(self.cycles.most_common()),
                "step_seconds": self.step_seconds,
                "model_flops_utilisation": self.utilisation,
                "tokens_per_second_per_chip": self.tokens_per_second,
                "includes": self.includes,
                "leaves_out": self.leaves_out,
            },
        }


def compile_step(config: Config, topology: Topology, schedules: bool = True) -> Report:
    """Compile config's training step for a topology. schedules: see `describe`; without them, Pallas kernels are left
    out of the estimate, and compiling takes half of the time.

    Raises:
      ConfigError: the mesh does not divide the topology's chips, the model or the batch; libtpu is not installed.
      DoesNotFit: a chip has too little memory; ConfigError: a core too little VMEM for a kernel.
    """
    if config.mesh.slice not in (1, topology.slices):
        raise ConfigError(f"mesh.slice is {config.mesh.slice}, and --slices {topology.slices}; leave mesh.slice out")
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, slice=topology.slices))
    mesh = mesh_of(config, describe(topology, schedules))
    started = time.perf_counter()
    with sharding.use_mesh(mesh):
        graphdef, state = abstract_state(config, mesh)
        step = step_of(config, graphdef, optimizer_of(config), state)
        traced = step.trace(state, abstract_batch(config, mesh))
        lowered = traced.lower()
        try:
            with compiling() as compile_started:
                compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            raise _refusal(error, config, topology) or error from None
    seconds = time.perf_counter() - started
    program, memory = Program(compiled.as_text()), compiled.memory_analysis()
    kernels = kernel_cycles(program, traced.jaxpr.jaxpr, compile_started)
    data, devices = config.data, topology.generation.devices
    parameters, optimizer, average = (_bytes(state.get(kind)) for kind in ("params", "optimizer", "ema"))
    batch = _bytes(abstract_batch(config, mesh))
    hbm = {
        "parameters": parameters,
        "optimizer state": optimizer,
        "average of the parameters": average,
        "batch": batch,
        "padding of these": memory.argument_size_in_bytes - parameters - optimizer - average - batch,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "activations, gradients and other temporaries": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }
    tokens = data.batch_size * data.sequence_length
    return Report(
        topology=topology,
        mesh=dict(mesh.shape),
        rows=data.batch_size,
        sequence_length=data.sequence_length,
        accumulation=config.training.gradient_accumulation,
        remat=config.model.remat,
        compile_seconds=seconds,
        hbm={kind: size * devices for kind, size in hbm.items()},
        host=memory.host_temp_size_in_bytes * devices,
        flops=training_flops_per_token(config.model, data.sequence_length) * tokens / topology.chips,
        cycles=program.cycles() + Counter({f"kernel {name}": cycles for name, cycles in kernels.cycles.items()}),
        kernels=kernels,
        collectives=program.collectives(dict(mesh.shape)),
        unknown_loops=program.unknown_loops(),
    )


def nearest_fit(config: Config, topology: Topology, used: float) -> Config | None:
    """For a configuration that does not fit, the nearest that does: the same batch with remat `full`, or in more
    microbatches; None if even one row at a time is too much. `used`: bytes per device that `config` needs."""
    if config.model.remat != "full":
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat="full"))
        try:
            compile_step(config, topology)
            return config
        except DoesNotFit as error:
            used = error.used
    limit = topology.generation.hbm / topology.generation.devices
    for smaller in _more_microbatches(config, topology):
        # Temporaries shrink at most in proportion to the rows; if it would not fit even then, it is not compiled.
        times = smaller.training.gradient_accumulation / config.training.gradient_accumulation
        if used / times > limit:
            continue
        try:
            compile_step(smaller, topology)
            return smaller
        except DoesNotFit:
            continue
    return None


def abstract_state(config: Config, mesh: jax.sharding.Mesh) -> tuple[Any, dict[str, Any]]:
    """Structure of the model, and the train step's state as shapes with their shardings on the mesh, which must be set.

    The optimizer's state is sharded like its parameters; its counters are on every device.
    """
    graphdef, params = abstract_model(config.model)

    def placed(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(lambda x: placed(x, x.sharding.spec), params)
    structure = jax.tree.structure(params)

    def like_params(x: Any) -> bool:
        return jax.tree.structure(x) == structure

    def place(x: Any) -> Any:
        if not like_params(x):
            return placed(x, PartitionSpec())
        return jax.tree.map(lambda x, param: placed(x, param.sharding.spec), x, params)

    state = jax.tree.map(place, jax.eval_shape(optimizer_of(config).init, params), is_leaf=like_params)
    average = {} if config.optimizer.ema is None else {"ema": params}
    return graphdef, {"params": params, "optimizer": state, **average}


def abstract_batch(config: Config, mesh: jax.sharding.Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch whose rows are sharded over the mesh."""
    shape = (config.data.batch_size, config.data.sequence_length)
    rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(sharding.BATCH)))
    return {name: rows for name in ("tokens", "targets", "segment_ids")}


def optimizer_of(config: Config) -> optax.GradientTransformation:
    """The optimizer of the run."""
    return make_optimizer(config.optimizer, config.training.steps)


def _bytes(tree: Any) -> int:
    """Bytes of one device's shards of the arrays."""
    leaves = jax.tree.leaves(tree)
    return sum(jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype).size * x.dtype.itemsize for x in leaves)


def _refusal(error: Exception, config: Config, topology: Topology) -> ConfigError | None:
    """The exception for the compiler's "ran out of memory", with our message; None for any other error."""
    text = str(error)
    of_kernel = r"memory space vmem .*? for %([a-z_]+).*?size ([\d.]+)M and limit ([\d.]+)M"
    if said := re.search(of_kernel, text, re.DOTALL):
        return ConfigError(
            f"model.head_dim is {config.model.head_dim}, with which the kernel {said.group(1)} needs {said.group(2)} "
            f"MiB of a core's VMEM on {topology.name}, where it may use {said.group(3)}; use a smaller one, or "
            "model.memory.form chunked"
        )
    if said := re.search(r"memory space hbm\. Used ([\d.]+)([MGT]) of", text):
        used = float(said.group(1)) * {"M": 2**20, "G": 2**30, "T": 2**40}[said.group(2)]
    elif said := re.search(r"Allocation \(size=(\d+)\) would exceed memory", text):  # a single array
        used = float(said.group(1))
    else:
        return None
    devices = topology.generation.devices
    return DoesNotFit(
        f"data.batch_size {config.data.batch_size} in {config.training.gradient_accumulation} microbatches with "
        f"model.remat {config.model.remat} does not fit {topology.name}: it needs at least {used * devices / GIB:.1f} "
        f"GiB a chip, which has {topology.generation.hbm / GIB:.1f}",
        used,
    )


def _more_microbatches(config: Config, topology: Topology) -> Iterator[Config]:
    """The same batch in more and more parts, down to one row at a time on every device."""
    mesh = mesh_of(
        dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, slice=topology.slices)), describe(topology)
    )
    rows = config.data.batch_size // (mesh.size // mesh.shape["tensor"])
    accumulation = config.training.gradient_accumulation
    for parts in range(accumulation + 1, rows + 1):
        if rows % parts == 0:
            yield dataclasses.replace(
                config, training=dataclasses.replace(config.training, gradient_accumulation=parts)
            )
