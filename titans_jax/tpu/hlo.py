"""Costs of an optimized HLO program of XLA:TPU, read from its text: cycles, collectives, kernels.

    program = Program(compiled.as_text())
    program.cycles()                          # the compiler's own estimates, by source file
    program.collectives({"data": 2, "fsdp": 4})

An instruction runs as often as the loops around it turn. The number of a loop's turns is the constant in its condition,
since jax's scans count up from 0. XLA gives no cycles for copies that run at the same time as other work, for
collectives and for Pallas kernels (for these see schedules.py).
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
SLICES = "slice"
"""The mesh axis across slices."""
KERNEL = "tpu_custom_call"
"""Custom call target of a Pallas kernel."""


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: %name = shape opcode(operands), attributes."""

    name: str
    shape: str
    opcode: str
    line: str = field(repr=False)

    def attribute(self, name: str) -> str | None:
        """The value of name=value, up to the next comma."""
        found = re.search(rf"\b{name}=%?([^,\s]+)", self.line)
        return found and found.group(1)

    @property
    def cycles(self) -> int:
        """The compiler's estimate, 0 where it gives none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.line)
        return int(found.group(1)) if found else 0

    @property
    def callees(self) -> list[str]:
        """Computations that run as part of this one, loops aside."""
        names = re.findall(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", self.line)
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.line)
        return names + (re.findall(r"[\w.\-]+", branches.group(1)) if branches else [])


@dataclass
class Collective:
    """Collectives of one kind along the same mesh axes, in one run of the program."""

    kind: str
    axes: tuple[str, ...]
    calls: int = 0
    sent: float = 0
    """Bytes each device sends, in rings."""


class Program:
    """An optimized, scheduled HLO module."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        self._text = text
        current: list[Instruction] = []
        for line in text.splitlines():
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if head:
                current = self.computations.setdefault(head.group(2), [])
                self.entry = head.group(2) if head.group(1) else self.entry
            elif line.startswith("  ") and (made := _instruction(line)):
                current.append(made)

    def cycles(self) -> Counter[str]:
        """Estimated cycles of one run, by the source file under titans_jax that asked for them ("" where unknown)."""
        found: Counter[str] = Counter()
        for instruction, times in self._run(inside_fusions=False):
            if instruction.cycles:
                found[self._source(instruction)] += times * instruction.cycles
        return found

    def kernels(self) -> list[tuple[Instruction, int]]:
        """Calls of Pallas kernels, and how often each runs."""
        return [
            (instruction, times)
            for instruction, times in self._run(inside_fusions=True)
            if instruction.opcode == "custom-call" and f'custom_call_target="{KERNEL}"' in instruction.line
        ]

    def collectives(self, mesh: dict[str, int]) -> list[Collective]:
        """Collectives by kind and mesh axes, most bytes first. `mesh`: sizes of the axes, outermost first."""
        found: dict[tuple, Collective] = {}
        seen = set()
        for instruction, times in self._run(inside_fusions=True):
            kind = instruction.opcode.removesuffix("-start")
            if kind not in COLLECTIVES and not _between_slices(instruction):
                continue
            channel = instruction.attribute("channel_id")
            if channel is not None and channel in seen:  # one collective, spread over several fusions that hide it
                continue
            seen.add(channel)
            if between := _between_slices(instruction):
                kind, axes, size = between, (SLICES,), mesh[SLICES]
            else:
                axes, size = _axes(instruction, mesh)
            if size == 1:
                continue
            sent = _sent(instruction, kind, size)
            if self._scatters(instruction):
                kind, sent = "reduce-scatter", sent / 2
            entry = found.setdefault((kind, axes), Collective(kind, axes))
            entry.calls += times
            entry.sent += times * sent
        return sorted(found.values(), key=lambda collective: -collective.sent)

    def unknown_loops(self) -> int:
        """Loops whose turns could not be read; they count as one turn."""
        return sum(
            instruction.opcode == "while" and self._turns(instruction) is None
            for instructions in self.computations.values()
            for instruction in instructions
        )

    def _run(self, inside_fusions: bool) -> Iterator[tuple[Instruction, int]]:
        """Every instruction that runs, and how often; a conditional runs the branch with most cycles."""

        def walk(name: str, times: int) -> Iterator[tuple[Instruction, int]]:
            for instruction in self.computations.get(name, ()):
                yield instruction, times
                if instruction.opcode == "while":
                    turns = times * (self._turns(instruction) or 1)
                    yield from walk(instruction.attribute("body"), turns)
                elif instruction.opcode == "conditional":
                    yield from walk(max(instruction.callees, key=self._own_cycles), times)
                elif instruction.opcode in ("call", "async-start") or (
                    inside_fusions and instruction.opcode == "fusion"
                ):
                    for callee in instruction.callees:
                        yield from walk(callee, times)

        return walk(self.entry, 1)

    def _own_cycles(self, name: str) -> int:
        return sum(instruction.cycles for instruction in self.computations.get(name, ()))

    def _turns(self, loop: Instruction) -> int | None:
        """The constant that the condition compares the counter with; None where it is not known."""
        name = loop.attribute("condition")
        constants = {
            int(value)
            for instruction in self.computations.get(name, ())
            if instruction.opcode == "constant"
            for value in re.findall(r" constant\((\d+)\)", instruction.line)
        }
        return constants.pop() if len(constants) == 1 else None

    def _scatters(self, instruction: Instruction) -> bool:
        """Whether an all-reduce is the first half of a fused reduce-scatter."""
        return instruction.opcode == "all-reduce" and instruction.name in self._scattered

    @cached_property
    def _scattered(self) -> set[str]:
        return {
            instruction.name
            for name, instructions in self.computations.items()
            if name.startswith("all-reduce-scatter")
            for instruction in instructions
        }

    @cached_property
    def _frames(self) -> dict[int, str]:
        """Stack frame -> path of its innermost file under titans_jax, "" where it has none."""
        tables: dict[str, dict[int, str]] = {}
        rows: dict[int, str] = {}
        for line in itertools.takewhile(lambda line: not line.startswith(("%", "ENTRY")), self._text.splitlines()):
            if re.fullmatch(r"[A-Z]\w+", line):
                rows = tables.setdefault(line, {})
            elif row := re.match(r"(\d+) (.*)", line):
                rows[int(row.group(1))] = row.group(2)

        def number(text: str, name: str) -> int:
            return int(re.search(rf"{name}=(\d+)", text).group(1))

        files = {key: value.strip('"') for key, value in tables.get("FileNames", {}).items()}
        places = {
            key: files.get(number(row, "file_name_id"), "") for key, row in tables.get("FileLocations", {}).items()
        }
        found: dict[int, str] = {}
        for key, row in sorted(tables.get("StackFrames", {}).items()):
            path = places.get(number(row, "file_location_id"), "")
            inside = re.search(r"titans_jax/((?:\w+/)*\w+)\.py$", path)
            found[key] = inside.group(1) if inside else found.get(number(row, "parent_frame_id") - 1, "")
        return found

    def _source(self, instruction: Instruction) -> str:
        frame = re.search(r"stack_frame_id=(\d+)", instruction.line)
        return self._frames.get(int(frame.group(1)), "") if frame else ""


def _instruction(line: str) -> Instruction | None:
    found = re.match(r"  (?:ROOT )?%?([\w.\-]+) = (.*)$", line)
    if not found:
        return None
    # A shape holds no "name(" but layouts such as T(8,128), so the opcode is the first lower-case word before one.
    opcode = re.search(r"(?:^|\s)([a-z][a-z0-9\-]*)\(", found.group(2))
    return opcode and Instruction(found.group(1), found.group(2)[: opcode.start()], opcode.group(1), line)


def _sizes(shape: str) -> list[float]:
    """Bytes of every array of a shape: bf16[2,128] has 16 bits an element, pred 8."""
    arrays = re.findall(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]", shape)
    return [int(bits or 8) / 8 * math.prod(int(n) for n in dims.split(",") if n) for _, bits, dims in arrays]


def _between_slices(instruction: Instruction) -> str | None:
    """The kind of a collective between slices, in which each device hands its part to its host; None for others."""
    transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.line)
    return transfer.group(1).lower().replace("_", "-") if transfer and instruction.opcode == "send" else None


def _sent(instruction: Instruction, kind: str, size: int) -> float:
    """Bytes that a device sends in a ring of `size` devices, computed from the size of the instruction's result."""
    arrays = _sizes(instruction.shape)
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):  # (operand, result, ...)
        arrays = arrays[1:2] if len(arrays) > 1 else arrays
    if instruction.opcode == "send":  # (operand, identifier, token)
        arrays = arrays[:1]
    result = sum(arrays)
    return {
        "all-gather": result * (size - 1) / size,
        "all-reduce": 2 * result * (size - 1) / size,
        "reduce-scatter": result * (size - 1),
        "all-to-all": result * (size - 1) / size,
        "ragged-all-to-all": result * (size - 1) / size,
        "collective-permute": result,
    }[kind]


def _axes(instruction: Instruction, mesh: dict[str, int]) -> tuple[tuple[str, ...], int]:
    """The mesh axes along which a collective's groups lie, and how many devices a group has."""
    names, sizes = list(mesh), list(mesh.values())
    pairs = re.search(r"source_target_pairs=\{((?:\{[\d,]+\},?)*)\}", instruction.line)
    if pairs:
        groups = [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs.group(1))]
    else:
        groups = _groups(instruction.line, math.prod(sizes))
    places = np.stack(np.unravel_index(np.array(groups), sizes))  # [axes, groups, devices]
    varies = np.any(places != places[..., :1], axis=(1, 2))
    axes = tuple(name for name, along in zip(names, varies, strict=True) if along)
    return axes, len(groups[0])


def _groups(line: str, devices: int) -> list[list[int]]:
    """Replica groups: written out, {{0,2},{1,3}}; as an iota, [2,2]<=[2,2]T(1,0); or as axes of a mesh of XLA's own,
    mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}, where device_ids may be an iota too, ([2,2]T(1,0)).

    Raises:
      ValueError: they are written in an unknown form.
    """
    text = re.search(r"replica_groups=(.*)", line)
    if text is None or text.group(1).startswith("{}"):  # all devices together
        return [list(range(devices))]
    text = text.group(1)
    if listed := re.match(r"\{((?:\{[\d,]+\},?)+)\}", text):
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed.group(1))]
    if iota := re.match(rf"\[(\d+)[\d,]*\]<={_IOTA}", text):
        return _iota(*iota.groups()[1:]).reshape(int(iota.group(1)), -1).tolist()
    if named := re.match(rf"mesh\[([^\]]*)\](?:, device_ids=\((?:{_IOTA}|([\d,]*))\))? ?\{{([^}}:]*)\}}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named.group(1))}
        dims, order, listed, axes = named.groups()[1:]
        count = str(math.prod(sizes.values()))
        ids = np.array([int(n) for n in listed.split(",")]) if listed else _iota(dims or count, order)
        along = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", axes)]
        ids = np.moveaxis(ids.reshape(list(sizes.values())), along, range(-len(along), 0))
        return ids.reshape(-1, math.prod(ids.shape[len(sizes) - len(along) :])).tolist()
    raise ValueError(f"replica_groups is {text[:80]}, a form that is not known")


_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
"""Whole numbers from 0 on, in an array of these sides, and then its sides in another order: [2,4]T(1,0)."""


def _iota(sides: str, order: str | None) -> np.ndarray:
    """The numbers that `_IOTA` describes."""
    shape = [int(n) for n in sides.split(",")]
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids if order is None else ids.transpose([int(n) for n in order.split(",")])
