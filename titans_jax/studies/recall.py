"""`titans study recall`: how many facts each memory keeps, against the size of its state.

One small model per preset, block, head_dim and seed learns multi-query associative recall (titans_jax.data.recall) and
is asked on sequences it has not seen. All have the same width, depth, training and number of parameters; a preset's
models differ only in how the width is cut into heads, so that a matrix memory of a layer holds dim x head_dim floats.
Answering with some value of the sequence is right 1 / num_pairs of the time. Transformer++ ("attention"), whose cache
keeps everything, is the reference for what can be learned; it is trained longer, as it has no convolution to show it
which value follows a key, and stays at chance until it has found that out.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from titans_jax import plots
from titans_jax.config import ConfigError, MemoryConfig, ModelConfig
from titans_jax.memory.rule.presets import PRESETS
from titans_jax.studies import models
from titans_jax.studies.models import ATTENTION
from titans_jax.studies.study import Cell, Column, Study, StudyOptions, at_least_one, register_study, with_seeds
from titans_jax.studies.table import Row
from titans_jax.studies.tasks import Recall


@dataclass(frozen=True)
class RecallOptions(StudyOptions):
    """Train small models of each memory on associative recall, and ask them on unseen sequences."""

    hard: bool = False
    """The sweep of 4 pairs in 64 tokens, 8 in 128 and 16 in 256, over a larger vocabulary."""
    presets: tuple[str, ...] = (*PRESETS, ATTENTION)
    """Names in titans_jax.memory.presets.PRESETS, and "attention"."""
    blocks: tuple[str, ...] = ("lmm",)
    """Blocks that hold the memories: lmm, mac, mag, mal."""
    head_dims: tuple[int, ...] = (8, 16)
    """Widths of a head, which set the size of the state; each divides dim."""
    sequence_lengths: tuple[int, ...] = (32,)
    """Tokens of a sequence, of one task after another."""
    num_pairs: tuple[int, ...] = (4,)
    """Key-value pairs of a sequence, of the same tasks."""
    vocab_size: int = 32
    """Tokens: half of them keys, half values."""
    dim: int = 64
    """Width of the residual stream; a model has dim / head_dim heads."""
    depth: int = 2
    """Blocks."""
    segment: int = 8
    """Segment of mac, and window of mag and mal: short of a sequence, so that only the memory reaches the pairs."""
    equal_parameters: bool = True
    """Widen the feed-forward layers until all models of a task have as many parameters as the largest."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(expansion=2, chunk_size=8))
    """The other fields of the memories."""
    max_step_sizes: tuple[float, ...] = ()
    """Largest inner step sizes tried, for presets that have one; the most accurate is drawn. None named is the one of
    `memory`."""
    steps: int = 800
    """Training steps of a memory."""
    attention_steps: int = 2500
    """Training steps of attention."""
    batch_size: int = 16
    """Sequences of a step."""
    learning_rate: float = 3e-3
    """Peak of the cosine, after a linear warm-up in a tenth of the steps."""
    test_sequences: int = 512
    """Unseen sequences asked about, the same for all models."""


@register_study("recall")
class RecallStudy(Study):
    """Facts kept by each kind of memory, against the size of its state."""

    options = RecallOptions

    def defaults(self, said: RecallOptions) -> RecallOptions:
        """See `Study`. The easy task is small enough for any machine; the hard one is cut down for two cores."""
        easy = RecallOptions(quick=said.quick, hard=said.hard)
        if not said.hard:
            return dataclasses.replace(easy, head_dims=(8,), seeds=1) if said.quick else easy
        hard = dataclasses.replace(easy, sequence_lengths=(64, 128, 256), num_pairs=(4, 8, 16), head_dims=(16, 32))
        if said.quick:
            few = ("linear_attention", "gated_deltanet", "titans", ATTENTION)
            return dataclasses.replace(
                hard, presets=few, head_dims=(16,), sequence_lengths=(64, 128), num_pairs=(4, 8), vocab_size=64, seeds=1
            )
        return dataclasses.replace(
            hard, vocab_size=8192, dim=128, batch_size=64, steps=8000, attention_steps=8000, learning_rate=1e-3
        )

    def cells(self, options: RecallOptions) -> list[Cell]:
        """See `Study`. As the size of attention's cache does not depend on head_dim, it is there once."""
        at_least_one(
            options, "presets", "blocks", "head_dims", "num_pairs", "sequence_lengths", "steps", "attention_steps",
            "batch_size", "dim", "depth", "segment",
        )  # fmt: skip
        if len(options.sequence_lengths) != len(options.num_pairs):
            raise ConfigError(
                f"sequence_lengths has {len(options.sequence_lengths)} and num_pairs {len(options.num_pairs)} entries; "
                "use one of each for every task"
            )
        models.check_presets(options.presets, others=(ATTENTION,))
        models.check_blocks(options.blocks)
        for head_dim in options.head_dims:
            if head_dim < 1 or options.dim % head_dim:
                raise ConfigError(f"head_dims has {head_dim}; use divisors of dim {options.dim}")
        cells: list[Cell] = []
        for task in tasks(options):
            labels, sized = zip(*((labels, task.fit_to(model)) for labels, model in kinds(options)), strict=True)
            if options.equal_parameters:
                sized = models.same_size(list(sized))
            for label, model in zip(labels, sized, strict=True):
                steps = options.attention_steps if label["preset"] == ATTENTION else options.steps
                place = {"pairs": task.num_pairs, "length": task.length}
                cells += with_seeds(options, [(label | place, model)], dataclasses.replace(task, steps=steps))
        return cells

    def columns(self, options: RecallOptions) -> list[Column]:
        """See `Study`."""
        return [Column("accuracy", "accuracy"), Column("recall_loss", "loss")]

    def notes(self, options: RecallOptions) -> str:
        """See `Study`."""
        pairs = ", ".join(f"{task.num_pairs} pairs in {task.length} tokens" for task in tasks(options))
        chance = ", ".join(f"{1 / task.num_pairs:.2f}" for task in tasks(options))
        return f"{pairs} of {options.vocab_size}, {options.steps} steps of {options.batch_size}; chance is {chance}"

    def draw(self, options: RecallOptions, rows: list[Row], file: Path, note: str) -> None:
        """See `Study`: accuracy against state size, a line per preset and block, bars over the seeds; a panel per task.

        What has models that were not finite says so in the legend.
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


def tasks(options: RecallOptions) -> list[Recall]:
    """One task for each length and number of pairs."""
    return [
        Recall(
            options.steps, options.batch_size, options.learning_rate, pairs, length, options.vocab_size,
            options.test_sequences,
        )
        for length, pairs in zip(options.sequence_lengths, options.num_pairs, strict=True)
    ]  # fmt: skip


def kinds(options: RecallOptions) -> Iterator[tuple[dict[str, Any], ModelConfig]]:
    """The labels and configuration of every kind of model."""
    for block, preset in itertools.product(dict.fromkeys(options.blocks), dict.fromkeys(options.presets)):
        attends, bounded = preset == ATTENTION, models.bounded(preset)
        if attends and block != options.blocks[0]:
            continue
        sizes = (options.max_step_sizes or (options.memory.max_step_size,)) if bounded else (None,)
        head_dims = options.head_dims if not attends else (max(options.head_dims),)
        for head_dim, size in itertools.product(dict.fromkeys(head_dims), dict.fromkeys(sizes)):
            memory = options.memory if size is None else dataclasses.replace(options.memory, max_step_size=size)
            model = models.small_model(preset, block, options.dim, options.depth, head_dim, memory)
            model = dataclasses.replace(model, segment=options.segment, window=options.segment)
            yield {
                "preset": preset, "block": "" if attends else block, "head_dim": head_dim, "max_step_size": size
            }, model  # fmt: skip


def lines(rows: list[Row]) -> dict[str, list[Row]]:
    """What the plot draws of each preset and block: the rows at each size of the state, from the smallest.

    With several step sizes, the one that is most accurate in the mean over seeds. Without any accuracy, nothing.
    """
    best: dict[str, dict[int, Row]] = {}
    several = len({row.labels["block"] for row in rows} - {""}) > 1
    known = [row for row in rows if row.spread("accuracy").count]
    for row in sorted(known, key=lambda row: row.spread("accuracy").mean):
        best.setdefault(line_name(row, several), {})[row.state_floats[0]] = row
    names = dict.fromkeys(line_name(row, several) for row in known)
    return {name: [best[name][floats] for floats in sorted(best[name])] for name in names}


def line_name(row: Row, with_block: bool) -> str:
    """The preset, and the block where there are several."""
    block = row.labels["block"]
    return f"{row.labels['preset']} {block}" if with_block and block else row.labels["preset"]
