"""TPU machines by name: generations of chips, the slices they come in, and described devices to compile for.

A slice has two names, its shape (v5e:4x8) and the accelerator type by which it is ordered (v5litepod-32); both are
understood. Some accelerator types count TensorCores, two on each chip: v5p-1024 has 512 chips.
"""

import importlib.util
import itertools
import math
import os
import re
from dataclasses import dataclass
from typing import Any

from titans_jax.config import ConfigError, did_you_mean
from titans_jax.ops.chips import GENERATIONS, Generation
from titans_jax.tpu.schedules import ask_for_schedules


@dataclass(frozen=True)
class Topology:
    """Slices of one shape."""

    generation: Generation
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return self.slices * math.prod(self.shape)

    @property
    def name(self) -> str:
        """The name of one slice by its shape, such as v5e:4x8."""
        return f"{self.generation.name}:{'x'.join(map(str, self.shape))}"

    @property
    def ordered_as(self) -> str:
        """The accelerator type of one slice, such as v5litepod-32."""
        return f"{self.generation.ordered_as}-{math.prod(self.shape) * self.generation.counted}"

    def __str__(self) -> str:
        slices = f"{self.slices} slices of " if self.slices > 1 else ""
        return f"{slices}{self.name} ({self.ordered_as}), {self.chips} chips"


def find_topology(name: str, slices: int = 1) -> Topology:
    """The topology with this name: a shape (v5e:4x8, v6e:16x16) or an accelerator type (v5litepod-32, v5p-8).

    Raises:
      ConfigError: there is none with this name; the message has the nearest.
    """
    known = {name: generation for name, generation in GENERATIONS.items() if generation.largest}
    by_type = {generation.ordered_as: generation for generation in known.values()}
    family, separator, size = re.fullmatch(r"([^:-]*)([:-]?)(.*)", name.lower()).groups()
    generation = (known if separator == ":" else by_type | known).get(family)
    if generation is None:
        names = [f"{g.name}:{'x'.join(map(str, g.largest))}" for g in known.values()]
        near = did_you_mean(family, [*known, *by_type])
        raise ConfigError(f"there is no topology {name}{near or '; use one such as ' + ', '.join(names)}")
    shapes = slice_shapes(generation)
    if re.fullmatch(r"\d+(x\d+)+", size):
        asked = tuple(map(int, size.split("x")))
        if asked in shapes:
            return Topology(generation, asked, slices)
        chips = math.prod(asked)
    elif re.fullmatch(r"\d+", size):
        chips = int(size) / generation.counted
        found = [shape for shape in shapes if math.prod(shape) == chips]
        if found:
            return Topology(generation, min(found, key=sum), slices)  # the one nearest to a cube
    else:
        chips = 1
    near = Topology(generation, min(shapes, key=lambda shape: (abs(math.prod(shape) - chips), sum(shape))))
    raise ConfigError(f"there is no topology {name}; the nearest is {near.name} ({near.ordered_as})")


def slice_shapes(generation: Generation) -> list[tuple[int, ...]]:
    """Shapes of the slices of a generation, the smallest first."""
    largest = generation.largest
    if len(largest) == 2:
        sides = [2**n for n in range(5)]
        shapes = [(a, b) for a in sides for b in (a, 2 * a) if b <= largest[1] and (a, b) != (1, 2)]
    else:  # parts of a cube of 4 x 4 x 4 chips, and whole cubes side by side
        cubes = itertools.combinations_with_replacement(range(4, largest[-1] + 1, 4), 3)
        inside = [shape for shape in cubes if math.prod(shape) <= math.prod(largest)]
        shapes = [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), *inside]
    return sorted(shapes, key=math.prod)


def prepare_compiler(schedules: bool = True) -> None:
    """Set what libtpu reads when it is loaded, which the first array of a process does; schedules: as of `describe`."""
    # Without these libtpu asks a metadata server which machine it is on, and allows only one process at a time.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if schedules:
        ask_for_schedules()


def describe(topology: Topology, schedules: bool = True) -> list[Any]:
    """The topology's devices, for the compiler only; nothing can be computed on them.

    schedules: have the compiler write the schedules of all that this process compiles, which takes as long as
    compiling. The process's first call decides, as the compiler is told when it is loaded.

    Raises:
      ConfigError: libtpu, which holds the compiler, is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            "libtpu is not installed, which holds the compiler for TPUs; pip install 'titans-jax[tpu]' (or pip "
            "install libtpu) brings it, and needs no TPU"
        )
    prepare_compiler(schedules)
    from jax.experimental import topologies

    options = {} if topology.slices == 1 else {"num_slices": topology.slices}
    if topology.chips == topology.slices:  # a host has four chips if not told otherwise
        options["chips_per_host_bounds"] = (1, 1, 1)
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **options).devices)
