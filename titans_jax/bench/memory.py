"""`titans bench memory`: tokens per second and temporaries of the memory, forward and backward, on this machine.

Gradients are taken with respect to everything: queries, keys, values, every gate and the learned start weights.
Float32, one process, the sequences shared out over the machine's devices (on a CPU, one per core).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from titans_jax import memory, plots, sharding
from titans_jax.bench.timing import check_rows, matmul_peak, median_seconds
from titans_jax.config import MemoryConfig, ModelConfig, gate_choices, memory_rule
from titans_jax.memory.rule.gate_choices import GateChoices
from titans_jax.memory.rule.presets import PRESETS
from titans_jax.models.flops import memory_flops

# (time, expansion, chunk_size): short sequences at both chunk sizes, then one layout from 1K to 32K tokens.
CASES = ((1024, 2, 64), (1024, 4, 16), (4096, 2, 16))
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Options:
    """Time the memory's forward and backward pass; without `time`, the standard cases and lengths 1K to 32K."""

    preset: Literal[tuple(PRESETS)] | None = None
    """Time this rule at 4,096 tokens, chunked and token by token, instead of the standard cases of Titans."""
    all: bool = False
    """Time every preset, chunked, at 4,096 tokens."""
    time: int | None = None
    """Tokens per sequence; None runs the standard cases."""
    expansion: int = 2
    """Hidden width of the memory over head_dim."""
    chunk_size: int = 64
    """Tokens per chunk."""
    batch: int = 2
    """Sequences."""
    num_heads: int = 4
    """Heads, each a memory of its own."""
    head_dim: int = 64
    """Width of a head."""
    depth: int = 2
    """Matrices of the memory's network."""
    architecture: Literal["residual_mlp", "mlp", "linear", "gated_mlp"] | None = None
    """The memory's network; None: the preset's own."""
    form: Literal["chunked", "associative", "recurrent"] = "chunked"
    """The form of the algorithm that is timed."""
    repeats: int = 7
    """Timed runs; the median is printed."""
    output: str = "runs/bench_memory"
    """Folder for memory.csv and memory.png."""


@dataclass(frozen=True)
class Measurement:
    """One row: the case, median tokens per second (all sequences), temporaries, and the share of the matmul peak."""

    preset: str
    time: int
    expansion: int
    chunk_size: int
    form: str
    tokens_per_second: float
    microseconds_per_token: float
    temporaries_megabytes: float
    gigaflops_per_second: float
    share_of_matmul_peak: float


def main(options: Options) -> None:
    """Time every case, print a table, and save it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    sharding.use_cores(options.batch)
    check_rows("batch", options.batch)
    console = Console()
    peak = matmul_peak()
    console.print(f"{sharding.machine()}, matmul peak of all cores {peak / 1e9:,.0f} GFLOP/s in float32")
    # 80 columns hold these; memory.csv has the rest.
    names = ("preset", "form", "time", "expansion,\nchunk", "tokens/s", "temporaries\nMB", "of peak")
    table = Table(*names, box=box.MINIMAL, padding=0, show_edge=False)
    rows = []
    for case in cases(options):
        with console.status(f"{case.preset}, {case.form}, {case.time:,} tokens, chunk {case.chunk_size}"):
            row = measure(case, peak)
        rows.append(row)
        table.add_row(
            row.preset, row.form, f"{row.time:,}", f"{row.expansion}, {row.chunk_size}",
            f"{row.tokens_per_second:,.0f}", f"{row.temporaries_megabytes:,.0f}", f"{row.share_of_matmul_peak:.0%}",
        )  # fmt: skip
        folder = save(rows, Path(options.output))
    console.print(table)
    if options.preset:
        chunked, recurrent = rows
        ratio = chunked.tokens_per_second / recurrent.tokens_per_second
        console.print(f"{options.preset}: the chunked form is {ratio:.1f} times as fast as the recurrent one")
    console.print(f"saved {folder}")


def cases(options: Options) -> list[Options]:
    """The cases to time, one per row of the table, as options with every choice made."""
    time = options.time or 4096
    if options.all:
        return [replace(options, preset=name, time=time) for name in PRESETS]
    if options.preset:
        return [replace(options, time=time, form=form) for form in ("chunked", "recurrent")]
    options = replace(options, preset="titans")
    if options.time:
        return [options]
    standard = CASES + tuple((length, 2, 64) for length in LENGTHS if (length, 2, 64) not in CASES)
    return [replace(options, time=time, expansion=e, chunk_size=c) for time, e, c in standard]


def measure(case: Options, peak: float) -> Measurement:
    """Compile and time one case."""
    model = ModelConfig(
        num_heads=case.num_heads,
        head_dim=case.head_dim,
        memory=MemoryConfig(
            preset=case.preset,
            depth=case.depth,
            expansion=case.expansion,
            architecture=case.architecture,
            chunk_size=case.chunk_size,
        ),
    )
    rule = memory_rule(model.memory)
    sizes = (case.batch, case.num_heads, case.time, case.head_dim)
    params, *rows = random_inputs(rule, gate_choices(model.memory), *sizes)
    rows, params = sharding.spread(rows, params)
    compiled = jax.jit(gradient_of_everything(rule, case.form)).lower(params, *rows).compile()
    seconds = median_seconds(lambda: compiled(params, *rows), case.repeats)
    rate = case.batch * case.time / seconds
    flops = 3 * rate * case.num_heads * memory_flops(model)
    temporaries = compiled.memory_analysis().temp_size_in_bytes * jax.device_count()  # it counts one device
    return Measurement(
        preset=case.preset,
        time=case.time,
        expansion=case.expansion,
        chunk_size=rule.chunk_size,
        form=case.form,
        tokens_per_second=rate,
        microseconds_per_token=1e6 / rate,
        temporaries_megabytes=temporaries / 1e6,
        gigaflops_per_second=flops / 1e9,
        share_of_matmul_peak=flops / peak,
    )


def gradient_of_everything(rule: memory.MemoryRule, form: str):
    """The gradient of a scalar of all reads, with respect to start parameters, queries, keys, values and gates."""

    def head(params, queries, keys, values, gates):
        state = memory.init_state(rule, params)
        reads, _ = memory.memorize(rule, params, state, queries, keys, values, gates, form)
        return reads

    rows = jax.vmap(jax.vmap(head))

    def loss(params, queries, keys, values, gates):
        # One copy per row, as in a layer: otherwise its gradient would be summed over devices at every chunk.
        params = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(queries), *x.shape)), params)
        return jnp.sum(jnp.square(rows(params, queries, keys, values, gates)))

    return jax.grad(loss, argnums=(0, 1, 2, 3, 4))


def random_inputs(rule: memory.MemoryRule, choices: GateChoices, batch: int, heads: int, length: int, head_dim: int):
    """Slow parameters [heads, ...]; queries, keys, values [batch, heads, time, (inner steps,) head_dim]; the gates the
    preset has. Queries are one for each token, unless a token has several of its own (`GateChoices.key_rank`)."""
    draws = iter(jax.random.split(jax.random.key(0), 16))
    init = functools.partial(memory.init_params, rule, head_dim=head_dim)
    params = jax.vmap(init)(jax.random.split(next(draws), heads))
    tokens, steps = (batch, heads, length), rule.algorithm.steps
    inner = tokens if steps == 1 else (*tokens, steps)
    read = inner if choices.key_rank(rule) > 1 else tokens
    normal = lambda *shape: jax.random.normal(next(draws), shape)  # noqa: E731
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    matrices = len(params["weights"])
    present = {name for name, gate in vars(choices.example(rule)).items() if gate is not None}
    channel = {}
    for name in ("log_key_retention", "log_value_retention"):
        if name in present:
            channel[name] = jax.nn.log_sigmoid(normal(*tokens, head_dim) + 4)
    for name in ("erase", "key_step_size", "value_step_size"):
        if name in present:
            channel[name] = jax.nn.sigmoid(normal(*inner, head_dim))
    if rule.bias.takes_gate:
        slopes = jnp.broadcast_to(jnp.arange(steps, 0, -1, dtype=jnp.float32) - 1, inner)
        channel["bias_gate"] = slopes if rule.bias.affine else jax.nn.softplus(normal(*inner))
    if "window_weight" in present:
        channel["window_weight"] = jax.nn.sigmoid(normal(*tokens, rule.algorithm.window - 1))
    gates = memory.Gates(
        log_retention=jax.nn.log_sigmoid(normal(*tokens, matrices) + 4),
        log_momentum=jax.nn.log_sigmoid(normal(*tokens, matrices)) if rule.algorithm.has_momentum else None,
        step_size=jax.nn.sigmoid(normal(*inner, matrices)) / head_dim,
        **channel,
    )
    return params, unit(normal(*read, head_dim)), unit(normal(*inner, head_dim)), normal(*inner, head_dim), gates


def save(rows: list[Measurement], folder: Path) -> Path:
    """memory.csv with every row, and memory.png: time per token against length, one line per case."""
    plots.save_csv(rows, folder / "memory.csv")
    lines: dict[str, list[Measurement]] = {}
    for row in rows:
        label = f"{row.preset}, {row.form}, expansion {row.expansion}, chunk {row.chunk_size}"
        lines.setdefault(label, []).append(row)
    with plots.figure(folder / "memory.png") as axes:
        for label, line in lines.items():
            line.sort(key=lambda row: row.time)
            axes.plot([row.time for row in line], [row.microseconds_per_token for row in line], marker="o", label=label)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="tokens per sequence", ylabel="microseconds per token", ylim=(0, None))
        axes.set_title("memory, forward and backward")
        axes.legend(fontsize=6)
    return folder
