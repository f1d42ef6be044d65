"""Cycles of Pallas kernels, from the final schedules that the TPU compiler writes: rows of bundles, one cycle each.

    devices = describe(topology)                    # which asks libtpu for its schedules, before it loads
    with compiling() as started:
        compiled = traced.lower().compile()
    kernel_cycles(Program(compiled.as_text()), traced.jaxpr, started)

A schedule gives the most that one step of a kernel's grid costs: it holds both sides of every condition, and a loop in
the kernel once. The numbers of steps and of loop turns are read from the traced program.
"""

import atexit
import contextlib
import functools
import math
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titans_jax.tpu.hlo import Instruction, Program

PASS = "final_hlo-static"
SUFFIX = f"{PASS}-per-bundle-utilization.txt"


@dataclass(frozen=True)
class Schedule:
    """Rows of one instruction's schedule, and the share of each kind of slot that they fill."""

    rows: int
    slots: dict[str, float]


@dataclass(frozen=True)
class Signature:
    """The key by which a kernel of the traced program is matched to its instruction: name and operand/result shapes."""

    name: str
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Kernel:
    """A Pallas kernel of a traced program. turns: turns of its longest loop, 1 without loops."""

    signature: Signature
    grid: tuple[int, ...]
    turns: int

    @property
    def steps(self) -> int:
        """Steps of the grid, without those that splash attention skips above the diagonal: its grid is as wide as the
        widest row of blocks, so only that of full causal attention, n x n blocks, has many."""
        total, name = math.prod(self.grid), self.signature.name
        if name.startswith("splash"):
            blocks, width = self.grid[-3 if "_dkv_" in name else -2], self.grid[-1]
            if blocks == width:
                return total * (width + 1) // (2 * width)
        return total


@dataclass
class Kernels:
    """Calls of Pallas kernels in one run of a program; `scheduled`: calls whose cycles are known; cycles by name."""

    calls: int = 0
    scheduled: int = 0
    cycles: Counter[str] = field(default_factory=Counter)


@functools.cache
def folder() -> Path:
    """Where libtpu writes its schedules, until this process ends."""
    made = tempfile.mkdtemp(prefix="titans_schedules_")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def ask_for_schedules() -> None:
    """Have libtpu write its schedules to `folder`, without effect once it is loaded. LIBTPU_INIT_ARGS is added to."""
    flags = {"to": folder(), "llo_text": "true", "llo_pass_label_regex": PASS}
    asked = " ".join(f"--xla_jf_dump_{name}={value}" for name, value in flags.items())
    said = os.environ.get("LIBTPU_INIT_ARGS", "")
    if asked not in said:
        os.environ["LIBTPU_INIT_ARGS"] = f"{said} {asked}".strip()


@contextlib.contextmanager
def compiling() -> Iterator[int]:
    """Yields the present time in ns; inside, jax's cache is off, since programs from the cache have no schedules."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax looks at the setting once
    try:
        yield time.time_ns()
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def kernel_cycles(program: Program, jaxpr: Any, started: int) -> Kernels:
    """Cycles of the kernels of a program compiled since `started` from a traced `jaxpr`: an upper bound, as every step
    and turn counts with all of the kernel's rows."""
    most: dict[Signature, int] = {}
    for kernel in pallas_kernels(jaxpr):
        most[kernel.signature] = max(most.get(kernel.signature, 0), kernel.steps * kernel.turns)
    calls = program.kernels()
    rows: dict[Signature, int] = {}
    for instruction, _ in calls:
        # The compiler schedules one of several equal instructions.
        if schedule := read_schedule(folder(), instruction.name, started):
            key = signature_of(instruction)
            rows[key] = max(rows.get(key, 0), schedule.rows)
    found = Kernels()
    for instruction, times in calls:
        key = signature_of(instruction)
        found.calls += times
        if key in rows and key in most:
            found.scheduled += times
            found.cycles[key.name] += times * most[key] * rows[key]
    return found


def pallas_kernels(jaxpr: Any) -> Iterator[Kernel]:
    """Every Pallas kernel of a traced program."""
    from jax.extend.core import jaxprs_in_params

    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            params = equation.params
            shapes = tuple(variable.aval.shape for variable in (*equation.invars, *equation.outvars))
            yield Kernel(Signature(params["name"], shapes), params["grid_mapping"].grid, _turns(params["jaxpr"]))
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from pallas_kernels(inner)


def _turns(jaxpr: Any) -> int:
    """Turns of the longest loop, times those of the loops inside it; one whose length is not known turns once."""
    from jax.extend.core import jaxprs_in_params

    most = 1
    for equation in jaxpr.eqns:
        turns = max(map(_turns, jaxprs_in_params(equation.params)), default=1)
        if equation.primitive.name == "scan":
            turns *= max(equation.params["length"] // equation.params["unroll"], 1)
        most = max(most, turns)
    return most


def signature_of(instruction: Instruction) -> Signature:
    """The signature of a kernel's instruction, without the number that XLA adds to names that occur several times."""
    operands = re.search(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}", instruction.line)
    arrays = re.findall(r"\w\[([\d,]*)\]", f"{operands.group(1) if operands else ''} {instruction.shape}")
    shapes = tuple(tuple(int(n) for n in dims.split(",") if n) for dims in arrays)
    return Signature(re.sub(r"(\.\d+)+$", "", instruction.name), shapes)


def read_schedule(folder: Path, instruction: str, started: int = 0) -> Schedule | None:
    """The last schedule of an instruction since `started`, in ns; None if the compiler wrote none.

    A file has four header lines (names and numbers of slots), then a row for each bundle with the slots it uses.
    """
    written = {int(file.name.split("-")[0]): file for file in folder.glob(f"*-{instruction}-*{SUFFIX}")}
    if not written or max(written) < started:
        return None
    _, names, capacity, _, *bundles = written[max(written)].read_text().splitlines()
    used = [sum(column) for column in zip(*(map(int, bundle.split()) for bundle in bundles), strict=True)]
    there = [int(number) * len(bundles) for number in capacity.split()]
    shares = {name: a / b for name, a, b in zip(names.split(", "), used, there, strict=True)}
    return Schedule(len(bundles), shares)
