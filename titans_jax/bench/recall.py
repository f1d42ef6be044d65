"""`titans bench recall`: how many facts each memory keeps, against the size of its state.

One small LMM per preset, head_dim and seed learns multi-query associative recall (titans_jax.data.recall) and is asked
on sequences it has not seen. All have the same width, depth and training; a preset's models differ only in how the
width is cut into heads, so that a matrix memory of a layer holds dim x head_dim floats. Answering with some value of
the sequence is right 1 / num_pairs of the time. Transformer++ ("attention"), whose cache keeps everything, is the
reference for what can be learned; it is trained longer, as it has no convolution to show it which value follows a key,
and stays at chance until it has found that out.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from titans_jax import plots, sharding
from titans_jax.bench.timing import spread
from titans_jax.config import (
    Config,
    ConfigError,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    did_you_mean,
    memory_rule,
)
from titans_jax.config.validate import validate
from titans_jax.data.recall import RecallTask, recall_sequences
from titans_jax.layers.neural_memory import MemoryLayerState
from titans_jax.memory.rule.presets import PRESETS
from titans_jax.models import check_model, has_memory
from titans_jax.models.loss import Batch, cross_entropy_sum
from titans_jax.training.optimizer import make_optimizer
from titans_jax.training.run import abstract_model, init_model
from titans_jax.training.step import make_train_step

ATTENTION = "attention"
HELD_OUT_SEED = 0
"""Seed of the sequences that all models are asked on; models and their training sequences have seeds 1, 2, ..."""


@dataclass(frozen=True)
class Options:
    """Train small models of each memory on associative recall, and ask them on unseen sequences."""

    presets: tuple[str, ...] = (*PRESETS, ATTENTION)
    """Names in titans_jax.memory.presets.PRESETS, and "attention"."""
    head_dims: tuple[int, ...] = (8, 16)
    """Widths of a head, which set the size of the state; each divides dim."""
    num_pairs: int = 4
    """Key-value pairs of a sequence."""
    sequence_length: int = 32
    """Tokens of a sequence."""
    vocab_size: int = 32
    """Tokens: half of them keys, half values."""
    dim: int = 64
    """Width of the residual stream; a model has dim / head_dim heads."""
    depth: int = 2
    """Blocks."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(expansion=2, chunk_size=8))
    """The other fields of the memories; `presets` and `max_step_sizes` set theirs."""
    max_step_sizes: tuple[float, ...] = (0.1, 1.0)
    """Largest inner step sizes tried, for presets that have one; the most accurate is drawn."""
    steps: int = 800
    """Training steps of a memory."""
    attention_steps: int = 2500
    """Training steps of attention."""
    batch_size: int = 16
    """Sequences of a step."""
    learning_rate: float = 3e-3
    """Peak of the cosine, after a linear warm-up in a tenth of the steps."""
    seeds: int = 2
    """Models of each kind, with different starts and training sequences."""
    test_sequences: int = 512
    """Unseen sequences asked about, the same for all models."""
    output: str = "runs/bench_recall"
    """Folder for recall.csv and recall.png."""


@dataclass(frozen=True)
class Measurement:
    """One trained model.

    max_step_size: None where the preset has none. state_floats: of one layer and one sequence. accuracy: share of
    unseen queries answered right. loss: mean cross entropy over them, nats. seconds: of training, compilation excluded.
    finite: no step had a loss or gradient that was not (such a step is skipped), nor had the evaluation.
    """

    preset: str
    head_dim: int
    max_step_size: float | None
    state_floats: int
    seed: int
    accuracy: float
    loss: float
    steps: int
    seconds: float
    finite: bool


def main(options: Options) -> None:
    """Train and ask every model, print a table, and save it."""
    task, models = task_and_models(options)
    sharding.use_cores(options.batch_size)
    console = Console()
    console.print(
        f"{task.num_pairs} pairs in {task.sequence_length} tokens of {task.vocab_size}, {options.steps} steps of "
        f"{options.batch_size} sequences, on {sharding.machine()}; chance is {1 / task.num_pairs:.2f}"
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows: list[Measurement] = []
    folder = Path(options.output)
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=options.seeds * sum(steps(options, kind.preset) for kind in models))
        for kind, model in models.items():
            progress.update(bar, description=f"{kind.preset}, head_dim {kind.head_dim}")
            for row in measure(options, task, kind, model, lambda: progress.advance(bar)):
                rows.append(row)
                plots.save_csv(rows, folder / "recall.csv")
                progress.console.print(
                    f"{row.preset:20}{row.state_floats:>7,} floats  step {step_words(row.max_step_size):4} "
                    f"seed {row.seed}  accuracy {row.accuracy:.3f}  "
                    f"loss {row.loss:.3f}  {row.seconds:5.1f} s" + ("" if row.finite else "  not finite")
                )
            save_plot(rows, 1 / task.num_pairs, folder)
    console.print(table(rows))
    console.print(f"saved {folder}")


class Kind(NamedTuple):
    """What the models of several seeds share."""

    preset: str
    head_dim: int
    max_step_size: float | None


def task_and_models(options: Options) -> tuple[RecallTask, dict[Kind, ModelConfig]]:
    """The task, and the configuration of every kind of model.

    The size of attention's cache does not depend on head_dim: it is there once, with the largest.

    Raises:
      ConfigError, DataError: an unknown preset, or a field that does not fit the others; one sentence.
    """
    for name in ("presets", "head_dims", "max_step_sizes"):
        if not getattr(options, name):
            raise ConfigError(f"{name} is empty; name at least one")
    for name in ("steps", "attention_steps", "batch_size", "seeds", "test_sequences"):
        if getattr(options, name) < 1:
            raise ConfigError(f"{name} is {getattr(options, name)}; use at least 1")
    if options.test_sequences % options.batch_size:
        works = -(-options.test_sequences // options.batch_size) * options.batch_size
        raise ConfigError(
            f"test_sequences is {options.test_sequences}; use a multiple of batch_size {options.batch_size}, such as "
            f"{works}"
        )
    for head_dim in options.head_dims:
        if head_dim < 1 or options.dim % head_dim:
            raise ConfigError(f"head_dims has {head_dim}; use divisors of dim {options.dim}")
    task = RecallTask(options.num_pairs, options.sequence_length, options.vocab_size)
    models = {}
    for preset in dict.fromkeys(options.presets):
        check_preset(preset)
        bounded = preset != ATTENTION and PRESETS[preset].gates.step_size == "bounded"
        head_dims = options.head_dims if preset != ATTENTION else [max(options.head_dims)]
        sizes = options.max_step_sizes if bounded else [None]
        for kind in dict.fromkeys(Kind(preset, *choice) for choice in itertools.product(head_dims, sizes)):
            models[kind] = model_config(options, kind)
            validate(Config(model=models[kind], optimizer=optimizer_config(options, preset)))
            check_model(models[kind])
    return task, models


def check_preset(name: str) -> None:
    """Refuse a name that is none of the presets, nor attention.

    Raises:
      ConfigError: names the nearest preset, or all.
    """
    names = (*PRESETS, ATTENTION)
    if name not in names:
        hint = did_you_mean(name, names) or f"; use {', '.join(names)}"
        raise ConfigError(f"there is no preset {name!r} in presets{hint}")


def model_config(options: Options, kind: Kind) -> ModelConfig:
    """A model of the bench. Without persistent tokens: what it knows at a query is what it read in the sequence."""
    memory, attends = options.memory, kind.preset == ATTENTION
    if not attends:
        memory = dataclasses.replace(memory, preset=kind.preset)
    if kind.max_step_size is not None:
        memory = dataclasses.replace(memory, max_step_size=kind.max_step_size)
    return ModelConfig(
        pattern=(ATTENTION,) if attends else ("lmm",),
        dim=options.dim,
        depth=options.depth,
        num_heads=options.dim // kind.head_dim,
        head_dim=kind.head_dim,
        vocab_size=options.vocab_size,
        num_persistent=0,
        dtype="float32",
        remat="none",
        memory=memory,
    )


def steps(options: Options, preset: str) -> int:
    """Training steps of a model."""
    return options.attention_steps if preset == ATTENTION else options.steps


def optimizer_config(options: Options, preset: str) -> OptimizerConfig:
    """AdamW by the cosine schedule."""
    return OptimizerConfig(learning_rate=options.learning_rate, warmup_steps=steps(options, preset) // 10)


def measure(
    options: Options, task: RecallTask, kind: Kind, model: ModelConfig, advance: Callable[[], None]
) -> Iterator[Measurement]:
    """Train one model per seed and evaluate it; `advance` is called after each step. Compiles once for all seeds."""
    graphdef, _ = abstract_model(model)
    num_steps = steps(options, kind.preset)
    optimizer = make_optimizer(optimizer_config(options, kind.preset), num_steps)
    train_step, recall_step = make_train_step(graphdef, optimizer, accumulation=1), make_recall_step(graphdef)
    held_out = recall_sequences(task, options.test_sequences, HELD_OUT_SEED)
    floats = state_floats(model, task.sequence_length)
    compiled = None
    for seed in range(1, options.seeds + 1):
        params = init_model(model, seed)[1]
        training = recall_sequences(task, num_steps * options.batch_size, seed)
        _, state = spread(None, {"params": params, "optimizer": optimizer.init(params)})
        compiled = compiled or train_step.lower(state, next(batches(training, options.batch_size))).compile()
        finite, start = True, time.perf_counter()
        for batch in batches(training, options.batch_size):
            state, metrics = compiled(state, batch)
            finite &= bool(np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"]))
            advance()
        seconds = time.perf_counter() - start
        totals = [recall_step(state["params"], batch) for batch in batches(held_out, options.batch_size)]
        nats, right, queries = np.sum(np.array(totals, np.float64), axis=0)
        finite &= bool(np.isfinite(nats))
        yield Measurement(*kind, floats, seed, right / queries, nats / queries, num_steps, seconds, finite)


def batches(sequences: dict[str, np.ndarray], size: int) -> Iterator[Batch]:
    """The sequences, `size` at a time, each a document of its own, shared out over the devices."""
    for first in range(0, len(sequences["tokens"]), size):
        batch = {name: rows[first : first + size] for name, rows in sequences.items()}
        yield spread(batch | {"segment_ids": None}, None)[0]


def make_recall_step(graphdef: nnx.GraphDef) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array, jax.Array]]:
    """Compiled (params, batch) -> (summed nats, queries answered right, queries)."""

    @jax.jit
    def recall_step(params, batch):
        logits = nnx.merge(graphdef, params)(batch["tokens"], batch["segment_ids"])
        nats, queries = cross_entropy_sum(logits, batch["targets"])
        # Without a query the target is -1, which is no token.
        return nats, jnp.sum(jnp.argmax(logits, axis=-1) == batch["targets"]), queries

    return recall_step


def state_floats(model: ModelConfig, sequence_length: int) -> int:
    """Floats that a layer carries from token to token for one sequence: its memories, or the cache of attention.

    Not counted: the last inputs of the convolutions, the same for all memories; and the anchor of a memory whose every
    token is a chunk, which is its weights once more.
    """
    graphdef, params = abstract_model(model)
    state = jax.eval_shape(lambda params: nnx.merge(graphdef, params).init_state(1, sequence_length), params)
    if has_memory(model):
        memories = [layer.memory for layer in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, MemoryLayerState))]
        if memory_rule(model.memory).chunk_size == 1:
            memories = [dataclasses.replace(memory, anchor=()) for memory in memories]
        state = memories
    floats = [x.size for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(floats) // model.depth


# Results


def by_kind(rows: list[Measurement]) -> dict[Kind, list[Measurement]]:
    """Rows of all seeds, in the order measured."""
    groups: dict[Kind, list[Measurement]] = {}
    for row in rows:
        groups.setdefault(Kind(row.preset, row.head_dim, row.max_step_size), []).append(row)
    return groups


def mean_accuracy(group: list[Measurement]) -> float:
    return float(np.mean([row.accuracy for row in group]))


def step_words(size: float | None) -> str:
    return "" if size is None else f"{size:g}"


def table(rows: list[Measurement]) -> Table:
    """A line per kind: means over seeds, with the least and most accurate seed."""
    table = Table("preset", "head_dim", "step", "floats", "accuracy", "seeds", "loss", "seconds", "finite")
    for kind, group in by_kind(rows).items():
        accuracies = [row.accuracy for row in group]
        table.add_row(
            kind.preset, str(kind.head_dim), step_words(kind.max_step_size), f"{group[0].state_floats:,}",
            f"{mean_accuracy(group):.3f}", f"{min(accuracies):.2f}-{max(accuracies):.2f}",
            f"{np.mean([row.loss for row in group]):.3f}", f"{np.mean([row.seconds for row in group]):.1f}",
            f"{sum(row.finite for row in group)} of {len(group)}",
        )  # fmt: skip
    return table


def lines(rows: list[Measurement]) -> dict[str, list[list[Measurement]]]:
    """What the plot draws of each preset: the runs of all seeds at each size of the state, from the smallest.

    With several step sizes, the one that is most accurate in the mean over seeds.
    """
    best: dict[str, dict[int, list[Measurement]]] = {}
    for kind, group in sorted(by_kind(rows).items(), key=lambda item: mean_accuracy(item[1])):
        best.setdefault(kind.preset, {})[group[0].state_floats] = group
    presets = dict.fromkeys(row.preset for row in rows)
    return {preset: [best[preset][floats] for floats in sorted(best[preset])] for preset in presets}


def save_plot(rows: list[Measurement], chance: float, folder: Path) -> None:
    """recall.png: accuracy against state size, a line per preset; bars from the least to the most accurate seed.

    A preset with runs that were not finite says so in the legend.
    """
    from matplotlib import colormaps

    colors, markers = colormaps["tab10"].colors, "osD^vP"
    with plots.figure(folder / "recall.png", 9, 5.5) as axes:
        for number, (preset, line) in enumerate(lines(rows).items()):
            accuracies = [np.array([row.accuracy for row in group]) for group in line]
            means = np.array([a.mean() for a in accuracies])
            spans = np.array([[mean - a.min(), a.max() - mean] for mean, a in zip(means, accuracies, strict=True)])
            broken = sum(not row.finite for group in line for row in group)
            axes.errorbar(
                [group[0].state_floats for group in line], means, np.maximum(spans.T, 0), capsize=3, markersize=6,
                color=colors[number % len(colors)], marker=markers[number // len(colors) * 3 % 6 + number % 3],
                linestyle="-" if number < len(colors) else "--",
                label=preset + f" ({broken} not finite)" * bool(broken),
            )  # fmt: skip
        axes.axhline(chance, color="gray", linestyle=":", label="a value at random")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="state of a layer, floats", ylabel="unseen queries answered right", ylim=(0, 1.03))
        axes.set_title("multi-query associative recall")
        axes.figure.legend(loc="outside right upper", fontsize="small")
