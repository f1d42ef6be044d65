"""`titans bench memory`: tokens per second and temporaries of the memory, forward and backward, on this machine.

Gradients are taken with respect to everything: queries, keys, values, every gate and the learned start weights.
Float32, one process, the sequences shared out over the machine's devices (on a CPU, one per core).
"""

from __future__ import annotations

import csv
import functools
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from titans_jax import memory, sharding
from titans_jax.arguments import parse
from titans_jax.bench.timing import matmul_peak, median_seconds, spread
from titans_jax.config import MemoryConfig, ModelConfig
from titans_jax.layers.neural_memory import memory_rule
from titans_jax.training.flops import memory_flops

# (time, expansion, chunk_size): short sequences at both chunk sizes, then one layout from 1K to 32K tokens.
CASES = ((1024, 2, 64), (1024, 4, 16), (4096, 2, 16))
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class MemoryBenchOptions:
    """Time the memory's forward and backward pass; without `time`, the standard cases and lengths 1K to 32K."""

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
    architecture: str = "residual_mlp"
    """linear, mlp, residual_mlp or gated_mlp."""
    form: str = "chunked"
    """recurrent, associative or chunked."""
    repeats: int = 7
    """Timed runs; the median is printed."""
    output: str = "runs/bench_memory"
    """Folder for memory.csv and memory.png."""


@dataclass(frozen=True)
class Measurement:
    """One row: the case, median tokens per second (all sequences), temporaries, and the share of the matmul peak."""

    time: int
    expansion: int
    chunk_size: int
    form: str
    tokens_per_second: float
    microseconds_per_token: float
    temporaries_megabytes: float
    gigaflops_per_second: float
    share_of_matmul_peak: float


def main(arguments: list[str]) -> None:
    """titans bench memory [--field value ...]"""
    from rich.console import Console
    from rich.table import Table

    options = parse("titans bench memory", MemoryBenchOptions, arguments, MemoryBenchOptions())
    sharding.use_cores(options.batch)
    console = Console()
    peak = matmul_peak()
    console.print(f"{sharding.machine()}, matmul peak of all cores {peak / 1e9:,.0f} GFLOP/s in float32")
    standard = CASES + tuple((length, 2, 64) for length in LENGTHS if (length, 2, 64) not in CASES)
    cases = standard if options.time is None else ((options.time, options.expansion, options.chunk_size),)
    table = Table("time", "expansion", "chunk", "tokens/s", "us/token", "temporaries MB", "GFLOP/s", "share of peak")
    rows = []
    with console.status("measuring") as status:
        for case in cases:
            status.update(f"measuring time {case[0]}, expansion {case[1]}, chunk {case[2]}")
            row = measure(options, *case, peak)
            rows.append(row)
            table.add_row(
                f"{row.time:,}", str(row.expansion), str(row.chunk_size), f"{row.tokens_per_second:,.0f}",
                f"{row.microseconds_per_token:.1f}", f"{row.temporaries_megabytes:,.0f}",
                f"{row.gigaflops_per_second:,.0f}", f"{row.share_of_matmul_peak:.0%}",
            )  # fmt: skip
    console.print(table)
    console.print(f"saved {save(rows, Path(options.output))}")


def measure(options: MemoryBenchOptions, length: int, expansion: int, chunk_size: int, peak: float) -> Measurement:
    """Compile and time one case."""
    model = ModelConfig(
        num_heads=options.num_heads,
        head_dim=options.head_dim,
        memory=MemoryConfig(
            depth=options.depth, expansion=expansion, architecture=options.architecture, chunk_size=chunk_size
        ),
    )
    rule = memory_rule(model.memory)
    params, *rows = random_inputs(rule, options.batch, options.num_heads, length, options.head_dim)
    rows, params = spread(rows, params)
    compiled = jax.jit(gradient_of_everything(rule, options.form)).lower(params, *rows).compile()
    seconds = median_seconds(lambda: compiled(params, *rows), options.repeats)
    rate = options.batch * length / seconds
    flops = 3 * rate * options.num_heads * memory_flops(model)
    temporaries = compiled.memory_analysis().temp_size_in_bytes * jax.device_count()  # it counts one device
    return Measurement(
        length, expansion, chunk_size, options.form, rate, 1e6 / rate, temporaries / 1e6, flops / 1e9, flops / peak
    )


def gradient_of_everything(rule: memory.MemoryRule, form: str):
    """The gradient of a scalar of all reads, with respect to start parameters, queries, keys, values and gates."""

    def head(params, queries, keys, values, gates):
        state = memory.init_state(rule, params)
        reads, _ = memory.memorize(rule, params, state, queries, keys, values, gates, form)
        return reads

    heads = jax.vmap(head)
    rows = jax.vmap(heads, in_axes=(None, 0, 0, 0, 0))

    def loss(params, queries, keys, values, gates):
        return jnp.sum(jnp.square(rows(params, queries, keys, values, gates)))

    return jax.grad(loss, argnums=(0, 1, 2, 3, 4))


def random_inputs(rule: memory.MemoryRule, batch: int, num_heads: int, length: int, head_dim: int):
    """Slow parameters [heads, ...]; queries, keys, values [batch, heads, time, head_dim]; gates per fast matrix."""
    keys = jax.random.split(jax.random.key(0), 7)
    init = functools.partial(memory.init_params, rule, head_dim=head_dim)
    params = jax.vmap(init)(jax.random.split(keys[0], num_heads))
    shape = (batch, num_heads, length, head_dim)
    queries, tokens, values = (jax.random.normal(key, shape) for key in keys[1:4])
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    logits = [jax.random.normal(key, (*shape[:3], len(params["weights"]))) for key in keys[4:]]
    gates = memory.Gates(
        log_retention=jax.nn.log_sigmoid(logits[0] + 4),
        log_momentum=jax.nn.log_sigmoid(logits[1]),
        step_size=jax.nn.sigmoid(logits[2]) / head_dim,
    )
    return params, unit(queries), unit(tokens), values, gates


def save(rows: list[Measurement], folder: Path) -> Path:
    """memory.csv with every row, and memory.png: time per token against length, one line per case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "memory.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, asdict(rows[0]))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for expansion, chunk_size in sorted({(row.expansion, row.chunk_size) for row in rows}):
        line = sorted((r for r in rows if (r.expansion, r.chunk_size) == (expansion, chunk_size)), key=lambda r: r.time)
        axes.plot(
            np.array([row.time for row in line]), np.array([row.microseconds_per_token for row in line]),
            marker="o", label=f"expansion {expansion}, chunk {chunk_size}",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens per sequence", ylabel="microseconds per token", ylim=(0, None))
    axes.set_title("memory, forward and backward")
    axes.legend()
    figure.savefig(folder / "memory.png", dpi=150)
    pyplot.close(figure)
    return folder
