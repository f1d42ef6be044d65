"""`titans bench schedule`: the TPU compiler's schedule of the fused kernel, in cycles per token of one head.

No TPU is needed, and the figures do not vary: they are rows of the final schedule, one cycle each, of one step of the
kernel's grid, divided by the tokens of the step. They are counted, not measured: waiting for HBM is not included. Every
sequence here has a prime number of chunks, so that no loop over chunks hides its turns.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from titans_jax import plots
from titans_jax.config import ConfigError
from titans_jax.tpu import schedules
from titans_jax.tpu.hlo import Program
from titans_jax.tpu.topology import describe, find_topology, prepare_compiler

CHUNKS = 11
KERNELS = ("memorize", "memorize_backward")
SLOTS = ("MXU", "VALU", "XLU", "VLOAD", "VSTORE", "VLOAD:FILL", "VSTORE:SPILL")


@dataclass(frozen=True)
class Case:
    """`rows` sequences of `heads` heads; a hidden layer, where the memory has one, is `expansion` times as wide."""

    head_dim: int
    chunk_size: int
    expansion: int = 4
    rows: int = 2
    heads: int = 16
    preset: str = "titans"
    letter: bool = False
    """True: the rule as the papers print it; False: as models have it by default, which forgets towards the start and
    bounds slopes."""

    @property
    def matrices(self) -> str:
        """The shapes of a head's fast matrices."""
        return ", ".join("x".join(map(str, shape)) for shape in rule_of(self).shapes(self.head_dim))


CASES = (Case(64, 16), Case(64, 64), Case(64, 256), Case(128, 256))


@dataclass(frozen=True)
class Options:
    """Compile the fused kernel for TPUs and print its schedule, by head_dim and chunk size; a case takes minutes."""

    topologies: tuple[str, ...] = ("v6e:1x1",)
    """Topologies to compile for, for example v6e:1x1 v5e:1x1 v5p:2x2x1."""
    chunk_sizes: tuple[int, ...] = ()
    """Only cases with these chunk sizes; empty: all cases."""
    preset: str = "titans"
    """A preset that a kernel runs, with the gates that it has in models (`titans models` says which)."""
    letter: bool = False
    """True: the rule as its paper prints it, which forgets to zero; False: as models have it by default, which forgets
    towards the start and bounds slopes."""
    xla: bool = True
    """Also compile the chunked form, by XLA, to compare with; for some memories that alone takes many minutes."""
    output: str = "runs/bench_schedule"
    """Folder for schedule.csv and schedule.png."""


@dataclass(frozen=True)
class Row:
    """One line of the table; figures are cycles per token of one head.

    outside: the rest of the training program, around the kernels, mostly sums of gates. xla_forward, xla_both: the
    chunked form as XLA compiles it; None where that was not asked for. These three are the compiler's estimates.
    """

    preset: str
    letter: bool
    topology: str
    head_dim: int
    matrices: str
    chunk_size: int
    forward: float
    both: float
    outside: float
    xla_forward: float | None
    xla_both: float | None
    forward_heads: int
    backward_heads: int
    forward_slots: dict[str, float]
    backward_slots: dict[str, float]


def main(options: Options) -> None:
    """Compile every case, print tables, and save them."""
    from rich.console import Console
    from rich.table import Table

    topologies = [find_topology(name).name for name in options.topologies]
    prepare_compiler()  # the presets' examples are arrays
    if options.preset not in (known := kernel_presets()):
        raise ConfigError(f"preset is {options.preset!r}; use one of {', '.join(known)}")
    sizes = {case.chunk_size for case in CASES}
    if unknown := set(options.chunk_sizes) - sizes:
        raise ConfigError(f"chunk_sizes has {min(unknown)}; use any of {', '.join(map(str, sorted(sizes)))}")
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("libtpu, which holds the compiler for TPUs, is not installed; pip install libtpu brings it")
    table = Table(
        "topology", "matrices", "chunk", "heads a step", "forward", "forward + backward", "outside", "XLA form",
        title=f"{options.preset}{', to the letter' if options.letter else ''}: scheduled cycles per token of one head",
    )  # fmt: skip
    slots = Table("topology", "matrices", "chunk", "kernel", *SLOTS, title="slots that the schedule fills")
    rows, console = [], Console()
    for topology in topologies:
        for case in (case for case in CASES if not options.chunk_sizes or case.chunk_size in options.chunk_sizes):
            case = dataclasses.replace(case, preset=options.preset, letter=options.letter)
            with console.status(f"{topology}, head_dim {case.head_dim}, chunk {case.chunk_size}"):
                row = measure(topology, case, options.xla)
            rows.append(row)
            name = (topology, case.matrices, str(case.chunk_size))
            xla = f"{row.xla_forward:.0f}, {row.xla_both:.0f}" if options.xla else ""
            table.add_row(
                *name, f"{row.forward_heads}, {row.backward_heads}", f"{row.forward:.1f}", f"{row.both:.1f}",
                f"{row.outside:.1f}", xla,
            )  # fmt: skip
            for kernel, filled in zip(KERNELS, (row.forward_slots, row.backward_slots), strict=True):
                slots.add_row(*name, kernel, *(f"{filled[slot]:.0%}" for slot in SLOTS))
            folder = save(rows, Path(options.output))
    console.print(table)
    console.print(slots)
    console.print(
        "Matrices: of a head. Heads a step: of the forward, and of the backward kernel. Outside: around the kernels, "
        "by the compiler's estimates, as the XLA form's figures are (forward, with the backward pass). "
        f"Here every chunk's start state is stored; where k chunks share one, as up to {_chunks_a_state()}, the "
        "backward kernel runs the writes of k - 1 of k chunks once more, which costs at most that part of the forward."
    )
    console.print(f"saved {folder}")


def _chunks_a_state() -> str:
    from titans_jax.memory.pallas import kernels

    numbers = {case.chunk_size: min(kernels.STATE_TOKENS // case.chunk_size, kernels.MOST_CHUNKS) for case in CASES}
    return ", ".join(f"{number} of {size} tokens" for size, number in numbers.items() if number > 1)


def measure(topology: str, case: Case, xla: bool = True) -> Row:
    """Compile a case for a topology; xla: the chunked form as XLA compiles it, too."""
    import jax

    tokens = case.rows * case.heads * CHUNKS * case.chunk_size
    mesh = jax.sharding.Mesh(describe(find_topology(topology))[:1], ("device",))
    with jax.set_mesh(mesh), schedules.compiling() as started:
        traced = jax.jit(gradient(case, "fused")).trace(*inputs(case, mesh))
        fused = Program(traced.lower().compile().as_text())
        cycles = {"outside": fused.cycles().total() / tokens, "xla_forward": None, "xla_both": None}
        for name, program in (("xla_forward", forward), ("xla_both", gradient)) if xla else ():
            compiled = jax.jit(program(case, "chunked")).lower(*inputs(case, mesh)).compile()
            cycles[name] = Program(compiled.as_text()).cycles().total() / tokens
    kernels = {kernel.signature.name: kernel for kernel in schedules.pallas_kernels(traced.jaxpr.jaxpr)}
    files = {schedules.signature_of(call).name: call.name for call, _ in fused.kernels()}
    ahead, back = (schedules.read_schedule(schedules.folder(), files[name], started) for name in KERNELS)
    # A step of the grid takes some heads, and a chunk, which is of fewer tokens where tokens have several inner steps.
    heads = [case.rows * case.heads // kernels[name].grid[0] for name in KERNELS]
    each = [kernel.rows * kernels[name].steps / tokens for name, kernel in zip(KERNELS, (ahead, back), strict=True)]
    return Row(
        case.preset, case.letter, topology, case.head_dim, case.matrices, case.chunk_size, each[0], sum(each),
        **cycles, forward_heads=heads[0], backward_heads=heads[1], forward_slots=ahead.slots,
        backward_slots=back.slots,
    )  # fmt: skip


def kernel_presets() -> list[str]:
    """Presets that a kernel runs with their own gates."""
    from titans_jax.memory.pallas import entry
    from titans_jax.memory.rule.presets import PRESETS

    return [name for name, one in PRESETS.items() if entry.supports(rule := one.make(), one.gates.example(rule))]


def rule_of(case: Case):
    """The memory rule of a case: as models have it, or as the papers print it."""
    from titans_jax.config import MemoryConfig, memory_rule

    reading = {"forget_to": "zero", "bound_slope": False, "scale_keys": False} if case.letter else {}
    sizes = {"expansion": case.expansion, "chunk_size": case.chunk_size}
    return memory_rule(MemoryConfig(preset=case.preset, **sizes, **reading))


def forward(case: Case, form: str, documents: bool = False):
    """The function that reads all heads, with a gate per token. documents: its last argument says where they begin."""
    import jax

    from titans_jax import memory

    rule = rule_of(case)

    def head(params, queries, keys, values, gates, resets=None):
        state = memory.init_state(rule, params)
        return memory.memorize(rule, params, state, queries, keys, values, gates, form, resets=resets)[0]

    heads = jax.vmap(head, in_axes=(0, 1, 1, 1, 1, *[None] * documents), out_axes=1)
    return jax.vmap(heads, in_axes=(None, 0, 0, 0, 0, *[0] * documents))


def gradient(case: Case, form: str, documents: bool = False):
    """The gradient function of a scalar of all reads, with respect to all float arguments."""
    import jax
    import jax.numpy as jnp

    reads = forward(case, form, documents)
    return jax.grad(lambda *arguments: jnp.sum(jnp.square(reads(*arguments))), argnums=(0, 1, 2, 3, 4))


def inputs(case: Case, mesh):
    """Shapes of the arguments of `forward`, as in a model: tokens bfloat16 [rows, time, heads, head_dim], all else
    float32."""
    import jax
    import jax.numpy as jnp

    from titans_jax.bench.memory import random_inputs
    from titans_jax.memory.rule.presets import PRESETS

    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=place)
    sizes = (case.rows, case.heads, CHUNKS * case.chunk_size, case.head_dim)
    params, *tokens, gates = jax.eval_shape(lambda: random_inputs(rule_of(case), PRESETS[case.preset].gates, *sizes))

    def heads_last(x, dtype):
        """[rows, heads, time, ...] as a model has it, [rows, time, heads, ...]."""
        rows, heads, time, *rest = x.shape
        return shape((rows, time, heads, *rest), dtype)

    params = jax.tree.map(lambda x: shape(x.shape, x.dtype), params)
    gates = jax.tree.map(lambda x: heads_last(x, jnp.float32), gates)
    return params, *[heads_last(x, jnp.bfloat16) for x in tokens], gates


def save(rows: list[Row], folder: Path) -> Path:
    """schedule.csv with every row, and schedule.png: the kernels, what is around them, and the XLA form."""
    flat = []
    for row in rows:
        plain = dataclasses.asdict(row)
        for kernel in ("forward", "backward"):
            plain |= {f"{kernel} {slot}": share for slot, share in plain.pop(f"{kernel}_slots").items()}
        flat.append(plain)
    plots.save_csv(flat, folder / "schedule.csv")
    bars = {
        "fused kernel, forward": [row.forward for row in rows],
        "fused kernels, forward + backward": [row.both for row in rows],
    }
    if all(row.xla_both is not None for row in rows):
        bars["chunked by XLA, forward"] = [row.xla_forward for row in rows]
        bars["chunked by XLA, forward + backward"] = [row.xla_both for row in rows]
    with plots.figure(folder / "schedule.png", width=2 + 1.6 * len(rows)) as axes:
        for i, (label, heights) in enumerate(bars.items()):
            places = [place + 0.2 * (i - 1.5) for place in range(len(rows))]
            axes.bar_label(axes.bar(places, heights, 0.2, label=label), fmt="%.3g", fontsize=7)
        places, around = [place - 0.1 for place in range(len(rows))], [row.outside for row in rows]
        drawn = axes.bar(
            places, around, 0.2, bottom=bars["fused kernels, forward + backward"], label="around the kernels",
            color="tab:orange", alpha=0.3,
        )  # fmt: skip
        axes.bar_label(drawn, fmt="%.3g", fontsize=7)
        labels = [f"{row.topology}\n{row.matrices}\nchunk {row.chunk_size}" for row in rows]
        axes.set_xticks(range(len(rows)), labels)
        axes.set(ylabel="scheduled cycles per token of one head")
        axes.figure.legend(fontsize=7, ncols=2, loc="outside upper center")
    return folder
