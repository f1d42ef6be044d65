"""`titans study distance`: the distance at which models that were trained on short sequences still recall a few facts.

Small models learn to recall a few pairs of a key and a value that stand somewhere among random tokens
(titans_jax.data.distant_recall), in sequences of one length, and are asked in longer ones, with the same number of
pairs: the state need not hold more, but must hold it longer. It asks the same question as needles in a haystack, for
models that are too small for those texts. A random value of the sequence is right 1 / num_pairs of the time.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from flax import nnx

from titans_jax import plots
from titans_jax.config import ConfigError, MemoryConfig, ModelConfig
from titans_jax.data.distant_recall import DistantRecall, distant_recall_sequences
from titans_jax.studies import models
from titans_jax.studies.generated import TEST_SEED, Generated, Sequences
from titans_jax.studies.models import WINDOW, WITHOUT_MEMORY
from titans_jax.studies.study import Cell, Column, Study, StudyOptions, at_least_one, register_study, with_seeds
from titans_jax.studies.table import Row, draw_spreads
from titans_jax.studies.tasks import Numbers


@dataclass(frozen=True)
class FarRecall(Generated):
    """Pairs among noise, asked at the end of sequences of the training length and of longer ones."""

    name: ClassVar[str] = "distant_recall"

    num_pairs: int = 4
    """Key-value pairs of a sequence, whatever its length."""
    length: int = 256
    """Tokens of a training sequence."""
    test_lengths: tuple[int, ...] = (256, 1024, 4096, 16384)
    """Tokens of the test sequences, one length after another."""
    pool_size: int = 16
    """How many tokens are keys, and how many others are values."""
    noise_size: int = 16
    """How many tokens are neither keys nor values."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a training sequence."""
        return self.length

    @property
    def vocabulary(self) -> int:
        """See `Generated`."""
        return self.sequences(self.length).vocab_size

    def sequences(self, length: int) -> DistantRecall:
        """The settings of sequences of this length."""
        return DistantRecall(self.num_pairs, length, self.pool_size, self.noise_size)

    def check(self, model: ModelConfig) -> None:
        """See `Task`."""
        super().check(model)
        for length in self.test_lengths:
            self.sequences(length)

    def draw(self, count: int, seed: int, asked: bool) -> Sequences:
        """See `Generated`; training and test have the same targets."""
        return distant_recall_sequences(self.sequences(self.length), count, seed)

    def measure(self, graphdef: nnx.GraphDef, params: object) -> Numbers:
        """accuracy_L, the share of right answers at length L, for each of test_lengths."""
        numbers = {}
        for length in self.test_lengths:
            rows = distant_recall_sequences(self.sequences(length), self.test_sequences, TEST_SEED)
            numbers[f"accuracy_{length}"] = self.ask(graphdef, params, rows).numbers["accuracy"]
        return numbers

    def baseline(self) -> tuple[str, Numbers]:
        """See `Task`."""
        names = {f"accuracy_{length}": 1 / self.num_pairs for length in self.test_lengths}
        return f"one of {self.num_pairs} values at random", names


@dataclass(frozen=True)
class DistanceOptions(StudyOptions):
    """Train small models to recall pairs among noise, and test them at greater distances."""

    presets: tuple[str, ...] = ("titans", "yaad", "moneta", "memora", "gated_deltanet", "mamba2", WINDOW)
    """Names in titans_jax.memory.presets.PRESETS; "window", attention that sees `segment` tokens; "attention", that
    sees all, and whose memory off a TPU grows with the square of the length; both with "_conv", with convolutions in
    the attention; "mamba" and "samba"."""
    blocks: tuple[str, ...] = ("lmm", "mac", "mag", "mal")
    """Blocks that hold the memories."""
    dim: int = 128
    """Width of the residual stream."""
    depth: int = 2
    """Blocks."""
    head_dim: int = 32
    """Width of a head."""
    segment: int = 64
    """Segment of mac, and window of mag, mal and "window"."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(expansion=2))
    """The other fields of the memories."""
    task: FarRecall = field(default_factory=lambda: FarRecall(steps=4000, batch_size=64, learning_rate=1e-3))
    """Sequences and training."""


@register_study("distance")
class DistanceStudy(Study):
    """Recall of facts among noise, at distances far beyond those of training."""

    options = DistanceOptions

    def defaults(self, said: DistanceOptions) -> DistanceOptions:
        """See `Study`."""
        default = DistanceOptions(quick=said.quick)
        if not said.quick:
            return default
        task = FarRecall(steps=800, batch_size=8, learning_rate=3e-3, test_sequences=64)
        presets = ("titans", "gated_deltanet", WINDOW)
        return dataclasses.replace(
            default, seeds=1, presets=presets, blocks=("lmm",), dim=64, head_dim=16, task=task
        )  # fmt: skip

    def cells(self, options: DistanceOptions) -> list[Cell]:
        """See `Study`."""
        at_least_one(options, "presets", "blocks", "dim", "depth", "head_dim", "segment")
        if not options.task.test_lengths:
            raise ConfigError("task.test_lengths is empty; name at least one, such as 1024")
        models.check_presets(options.presets, others=WITHOUT_MEMORY)
        models.check_blocks(options.blocks)
        kinds, sizes = [], (options.dim, options.depth, options.head_dim)
        for block, preset in models.in_blocks(options.blocks, options.presets):
            model = models.small_model(preset, block, *sizes, options.memory, segment=options.segment)
            kinds.append(({"preset": preset, "block": block}, model))
        return list(with_seeds(options, kinds, options.task))

    def columns(self, options: DistanceOptions) -> list[Column]:
        """See `Study`."""
        lengths = dict.fromkeys(options.task.test_lengths)
        return [Column(f"accuracy_{length}", f"right in {length:,}") for length in lengths]

    def notes(self, options: DistanceOptions) -> str:
        """See `Study`."""
        task = options.task
        return (
            f"{task.num_pairs} pairs among noise, trained in sequences of {task.length}, {task.steps} steps of "
            f"{task.batch_size}; {task.test_sequences} sequences of each length asked"
        )

    def draw(self, options: DistanceOptions, rows: list[Row], file: Path, note: str) -> None:
        """See `Study`: accuracy against length, a line per model."""
        lengths = sorted(set(options.task.test_lengths))
        with plots.figure(file, 8, 4.5, note=note) as axes:
            for number, row in enumerate(rows):
                draw_spreads(
                    axes, {length: row.spread(f"accuracy_{length}") for length in lengths},
                    color=f"C{number % 10}", linestyle="-" if number < 10 else "--",
                    label=" ".join(filter(None, (row.labels["preset"], row.labels["block"]))),
                )  # fmt: skip
            axes.axhline(1 / options.task.num_pairs, color="gray", linestyle=":", label="a value at random")
            axes.axvline(options.task.length, color="gray", linewidth=0.8)
            axes.set_xscale("log", base=2)
            axes.set(xlabel="tokens (vertical line: trained on)", ylabel="right answers", ylim=(0, 1.03))
            axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
