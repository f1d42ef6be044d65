"""`titans study mqar`: how many facts each memory keeps, against the size of its state (Zoology's Figure 2).

One small model per preset, block, width, head_dim, learning rate and seed learns multi-query associative recall
(titans_jax.data.recall) and is tested on sequences it has not seen. All models of a width have the same depth, training
and number of parameters; a matrix memory of a layer holds dim x head_dim floats. Of the learning rates, and of the step
sizes where several are tried, the table has the one that is best on validation sequences. A random value of the
sequence is right 1 / num_pairs of the time. Transformer++ ("attention"), whose cache keeps everything, shows what can
be learned at all.

The sweep differs from Zoology's (arXiv 2312.04927) in these points: the models here have feed-forward layers; all
sequences are new, where Zoology repeats 100,000 for at most 64 epochs, 12,500 steps of 512; gradients are clipped at
norm 1; the cosine falls with every step, not every epoch; the learning rate is chosen on validation sequences, not on
test sequences; and there are 3,072 test sequences, whole batches, not 3,000. With --quick and --easy there is a warm-up
in a tenth of the steps, and a cosine to a tenth of the peak; and in the easy task the vocabulary is as large as a
sequence is long, where Zoology's must be larger.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from titans_jax import plots
from titans_jax.config import ConfigError, MemoryConfig, ModelConfig, OptimizerConfig
from titans_jax.memory.rule.presets import PRESETS
from titans_jax.studies import models
from titans_jax.studies.generated import Recall
from titans_jax.studies.models import ATTENTION, WINDOW, WITHOUT_MEMORY
from titans_jax.studies.study import Cell, Column, Study, StudyOptions, at_least_one, register_study, with_seeds
from titans_jax.studies.table import Row, best_of

MOST_TOKENS = 65_536
"""Tokens of a step at most."""


@dataclass(frozen=True)
class MqarOptions(StudyOptions):
    """Train small models of each memory on associative recall, and test them on unseen sequences."""

    easy: bool = False
    """In place of the sweep, one easy task at one learning rate: 4 pairs in sequences of 32 tokens, with a vocabulary
    of 32. Two cores show differences in minutes."""
    presets: tuple[str, ...] = (*PRESETS, ATTENTION)
    """Names in titans_jax.memory.presets.PRESETS, "attention", "window", attention that sees `segment` tokens,
    "attention_conv" and "window_conv", with convolutions in the attention, "mamba" and "samba"."""
    blocks: tuple[str, ...] = ("lmm",)
    """Blocks that hold the memories: lmm, mac, mag, mal, retrofit; "hope" for Hope."""
    dims: tuple[int, ...] = (64, 128, 256, 512)
    """Widths of the residual stream; a model has dim / head_dim heads."""
    head_dims: tuple[int, ...] = (16,)
    """Widths of a head, which set the size of the state; each divides every dim."""
    sequence_lengths: tuple[int, ...] = (64, 128, 256)
    """Tokens of a sequence, one number for each task."""
    num_pairs: tuple[int, ...] = (4, 8, 16)
    """Key-value pairs of a sequence, one number for each of the same tasks."""
    vocab_size: int = 8192
    """Tokens: half of them keys, half values; more than the length of a sequence, except in the easy task."""
    random_fill: bool = False
    """Random tokens between the queries, in place of Figure 2's blanks."""
    depth: int = 2
    """Blocks."""
    segment: int = 8
    """Segment of mac, and window of mag, mal and "window": shorter than a sequence, so that only a memory reaches the
    pairs."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(expansion=2, chunk_size=8))
    """The other fields of the memories."""
    max_step_sizes: tuple[float, ...] = ()
    """Largest inner step sizes tried, for presets that have one. Empty: the one of `memory`."""
    learning_rates: tuple[float, ...] = tuple(np.logspace(-4, -2, 4).tolist())
    """Learning rates tried, as peaks of the cosine schedule."""
    steps: int = 3200
    """Training steps of a memory; fewer where its validation accuracy reaches 0.99."""
    attention_steps: int = 3200
    """Training steps of attention, which has no convolution to join a key with the value after it."""
    batch_size: int = 512
    """Sequences of a step, halved until they have at most 65,536 tokens, as in Zoology: 512 of length 128, 256 of
    length 256."""
    validation_sequences: int = 1024
    """Sequences for early stopping and to choose the learning rate; 0 requires a single learning rate."""
    test_sequences: int = 3072
    """Unseen test sequences, the same for all models."""


@dataclass(frozen=True)
class ZoologyRecall(Recall):
    """Recall trained as in Zoology's sweep."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """AdamW with a cosine to 0, without warm-up."""
        return dataclasses.replace(super().optimizer, warmup_steps=0, final_learning_rate_ratio=0.0, beta2=0.999)


@register_study("mqar")
class MqarStudy(Study):
    """Facts kept by each kind of memory, against the size of its state."""

    options = MqarOptions

    def defaults(self, said: MqarOptions) -> MqarOptions:
        """See `Study`. The easy task is small enough for any machine; the sweep is cut down for two cores."""
        sweep = MqarOptions(quick=said.quick, easy=said.easy)
        small = dataclasses.replace(
            sweep, dims=(64,), steps=800, attention_steps=2500, batch_size=16, learning_rates=(3e-3,),
            validation_sequences=0, test_sequences=512,
        )  # fmt: skip
        if said.easy:
            easy = dataclasses.replace(small, sequence_lengths=(32,), num_pairs=(4,), vocab_size=32, head_dims=(8, 16))
            return dataclasses.replace(easy, head_dims=(8,), seeds=1) if said.quick else easy
        if not said.quick:
            return sweep
        few = ("linear_attention", "gated_deltanet", "titans", ATTENTION)
        return dataclasses.replace(
            small, presets=few, sequence_lengths=(64, 128), num_pairs=(4, 8), vocab_size=256, seeds=1,
            learning_rates=(1e-3, 3e-3), validation_sequences=256, attention_steps=1600,
        )  # fmt: skip

    def cells(self, options: MqarOptions) -> list[Cell]:
        """See `Study`. Attention has one model for all head_dims, as the size of its cache does not depend on them."""
        at_least_one(
            options, "presets", "blocks", "dims", "head_dims", "num_pairs", "sequence_lengths", "steps",
            "attention_steps", "batch_size", "depth", "segment", "learning_rates",
        )  # fmt: skip
        if len(options.sequence_lengths) != len(options.num_pairs):
            raise ConfigError(
                f"sequence_lengths has {len(options.sequence_lengths)} and num_pairs {len(options.num_pairs)} entries; "
                "use one of each for every task"
            )
        longest = max(options.sequence_lengths)
        if options.vocab_size <= longest and not options.easy:
            raise ConfigError(
                f"vocab_size is {options.vocab_size}; use more than {longest}, the longest of sequence_lengths"
            )
        for name in ("learning_rates", "max_step_sizes"):
            several = len(set(getattr(options, name)))
            if several > 1 and not options.validation_sequences:
                raise ConfigError(f"validation_sequences is 0; use some to choose among {several} {name}, such as 256")
        models.check_presets(options.presets, others=WITHOUT_MEMORY)
        models.check_blocks(options.blocks)
        for dim, head_dim in itertools.product(options.dims, options.head_dims):
            if head_dim < 1 or dim < 1 or dim % head_dim:
                raise ConfigError(f"head_dims has {head_dim}; use divisors of dim {dim}")
        cells: list[Cell] = []
        for task, dim in itertools.product(tasks(options), dict.fromkeys(options.dims)):
            for (label, model), rate in itertools.product(kinds(options, dim), dict.fromkeys(options.learning_rates)):
                steps = options.attention_steps if label["preset"] in (ATTENTION, WINDOW) else options.steps
                place = {"learning_rate": rate, "pairs": task.num_pairs, "length": task.length}
                this = dataclasses.replace(task, steps=steps, learning_rate=rate)
                cells += with_seeds(options, [(label | place, model)], this)
        return cells

    def columns(self, options: MqarOptions) -> list[Column]:
        """See `Study`."""
        return [Column("accuracy", "accuracy"), Column("loss", "loss")]

    def finish(self, options: MqarOptions, rows: list[Row]) -> list[Row]:
        """See `Study`: the learning rate and step size that are best on validation sequences."""
        return best_of(rows, ("learning_rate", "max_step_size"), "validation")

    def notes(self, options: MqarOptions) -> str:
        """See `Study`."""
        every = tasks(options)
        pairs = ", ".join(f"{task.num_pairs} pairs in {task.length} tokens" for task in every)
        chance = ", ".join(f"{1 / task.num_pairs:.2f}" for task in every)
        sizes = " or ".join(str(size) for size in dict.fromkeys(task.batch_size for task in every))
        how = "cut down, not Zoology's training"
        if isinstance(every[0], ZoologyRecall):
            how = "trained as by Zoology, but for its epochs; feed-forward layers, gradients clipped"
        rates = f", the best of {len(options.learning_rates)} learning rates on validation"
        return (
            f"{pairs} of {options.vocab_size}, {'random tokens' if options.random_fill else 'blanks'} between queries, "
            f"{options.steps} steps of {sizes} new sequences{rates if len(options.learning_rates) > 1 else ''}; "
            f"chance is {chance}; {how}"
        )

    def draw(self, options: MqarOptions, rows: list[Row], file: Path, note: str) -> None:
        """See `Study`: accuracy against state size, a line per preset and block, bars over the seeds; a panel per task.

        The legend says how many models of a line were not finite.
        """
        from matplotlib import colormaps

        colors, markers = colormaps["tab10"].colors, "osD^vP"
        every = tasks(options)
        with plots.panels(file, len(every), 4 + 5 * len(every), 5.5, note=note) as panels:
            for axes, task in zip(panels, every, strict=True):
                place = (task.num_pairs, task.length)
                here = lines([row for row in rows if (row.labels["pairs"], row.labels["length"]) == place])
                for number, (name, line) in enumerate(here.items()):
                    spreads = [row.spread("accuracy") for row in line]
                    means = [s.mean for s in spreads]
                    spans = np.array([[max(s.mean - s.least, 0), max(s.most - s.mean, 0)] for s in spreads])
                    broken = sum(row.not_finite + row.failed for row in line)
                    axes.errorbar(
                        [row.state_floats[0] for row in line], means, spans.T, capsize=3, markersize=6,
                        color=colors[number % len(colors)],
                        marker=markers[number // len(colors) * 3 % 6 + number % 3],
                        linestyle="-" if number < len(colors) else "--",
                        label=name + f" ({broken} not finite)" * bool(broken),
                    )  # fmt: skip
                axes.axhline(1 / task.num_pairs, color="gray", linestyle=":", label="a value at random")
                axes.set_xscale("log", base=2)
                axes.set(xlabel="state of a layer, floats", ylabel="unseen queries answered right", ylim=(0, 1.03))
                axes.set_title(f"multi-query recall, {task.num_pairs} pairs in {task.length}")
            handles, names = panels[0].get_legend_handles_labels()
            panels[0].figure.legend(handles, names, loc="outside right upper", fontsize="small")


def tasks(options: MqarOptions) -> list[Recall]:
    """One task for each length and number of pairs."""
    kind = Recall if options.easy or options.quick else ZoologyRecall
    return [
        kind(
            steps=options.steps, batch_size=batch_size(options, length), num_pairs=pairs, length=length,
            vocab_size=options.vocab_size, random_fill=options.random_fill,
            validation_sequences=options.validation_sequences, test_sequences=options.test_sequences,
        )
        for length, pairs in dict.fromkeys(zip(options.sequence_lengths, options.num_pairs, strict=True))
    ]  # fmt: skip


def batch_size(options: MqarOptions, length: int) -> int:
    """Sequences of this length in a step."""
    size = options.batch_size
    while size > 1 and size * length > MOST_TOKENS:
        size //= 2
    return size


def kinds(options: MqarOptions, dim: int) -> Iterator[tuple[dict[str, Any], ModelConfig]]:
    """The labels and configuration of every kind of model of a width."""
    for block, preset in models.in_blocks(options.blocks, options.presets):
        bounded = models.bounded(preset)
        sizes = (options.max_step_sizes or (options.memory.max_step_size,)) if bounded else (None,)
        head_dims = options.head_dims if preset not in WITHOUT_MEMORY else (max(options.head_dims),)
        for head_dim, size in itertools.product(dict.fromkeys(head_dims), dict.fromkeys(sizes)):
            memory = options.memory if size is None else dataclasses.replace(options.memory, max_step_size=size)
            model = models.small_model(preset, block, dim, options.depth, head_dim, memory, segment=options.segment)
            yield {
                "preset": preset, "block": block, "dim": dim, "head_dim": head_dim,
                "max_step_size": size,
            }, model  # fmt: skip


def lines(rows: list[Row]) -> dict[str, list[Row]]:
    """The lines of the plot, by preset and block: the rows that have an accuracy, from the smallest state on."""
    several = len({row.labels["block"] for row in rows} - {""}) > 1
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.state_floats[0]):
        if row.spread("accuracy").count:
            found.setdefault(line_name(row, several), []).append(row)
    names = dict.fromkeys(line_name(row, several) for row in rows)
    return {name: found[name] for name in names if name in found}


def line_name(row: Row, with_block: bool) -> str:
    """The preset, and the block where there are several."""
    block = row.labels["block"]
    return f"{row.labels['preset']} {block}" if with_block and block else row.labels["preset"]
