"""`titans study mad`: the six tasks of MAD, each at its baseline setting and with one value changed at a time.

A model's score at a setting is its accuracy over classes on test sequences (macro-averaged in each batch of 128, as
MAD's code does, then the mean over batches), at the learning rate and weight decay that are best on validation
sequences; a task's score is the mean over its settings, and MAD's the mean over the six tasks.

MAD itself (arXiv 2403.17844) differs: it chooses learning rate and weight decay on the test sequences, among three
rates and two decays (here by default two rates, one decay); it trains in bfloat16 (here float32) for 200 epochs (here
at most 40 by default, a training ends early once its validation score is 0.999, and its best epoch counts); and the
cosine of its learning rate goes down once an epoch (here with every step).
"""

import dataclasses
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flax import nnx

from titans_jax import plots
from titans_jax.config import ConfigError, MemoryConfig, ModelConfig, OptimizerConfig, did_you_mean
from titans_jax.data.mad import SETTINGS, MadSetting, mad_sequences, settings
from titans_jax.studies import models
from titans_jax.studies.generated import Answers, Generated, Sequences
from titans_jax.studies.models import ATTENTION, MAMBA
from titans_jax.studies.study import Cell, Column, Study, StudyOptions, at_least_one, register_study, with_seeds
from titans_jax.studies.table import Baseline, Row, best_of, joined_row, means_by_seed
from titans_jax.studies.tasks import Numbers

PUBLISHED: dict[str, dict[str, float]] = {
    "Transformer, as Titans prints it": {"compression": 0.494, "in-context-recall": 1.0,
        "fuzzy-in-context-recall": 0.482, "selective-copying": 0.959, "memorization": 0.838},
    "Gated DeltaNet, as Titans prints it": {"compression": 0.448, "in-context-recall": 1.0,
        "fuzzy-in-context-recall": 0.325, "selective-copying": 0.962, "memorization": 0.817},
    "Titans LMM, as printed": {"compression": 0.496, "in-context-recall": 1.0,
        "fuzzy-in-context-recall": 0.497, "selective-copying": 0.994, "memorization": 0.835},
}  # fmt: skip
"""Scores over all settings from the later version of the Titans paper, which has no noisy recall."""

MACRO_OVER = 128
"""Sequences over which MAD's code averages the classes: one batch."""
LAST_LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Mad(Generated):
    """One task of MAD at one difficulty."""

    name: ClassVar[str] = "mad"
    enough: ClassVar[float] = 0.999
    score_number: ClassVar[str] = "macro_accuracy"

    setting: MadSetting = field(default_factory=lambda: SETTINGS["in-context-recall"])
    """The settings of the sequences; its train_sequences are repeated every epoch."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """AdamW with a cosine to 1e-6, without warm-up, as in MAD, where it goes down once an epoch."""
        last = LAST_LEARNING_RATE / max(self.learning_rate, LAST_LEARNING_RATE)
        return dataclasses.replace(
            super().optimizer, warmup_steps=0, final_learning_rate_ratio=last, weight_decay=self.weight_decay,
            beta2=0.999,
        )  # fmt: skip

    @property
    def sequence_length(self) -> int:
        """Tokens of a training row."""
        return self.setting.length

    @property
    def vocabulary(self) -> int:
        """See `Generated`."""
        return self.setting.vocab_size

    def fit_to(self, model: ModelConfig) -> ModelConfig:
        """See `Task`; compression has a head of its own."""
        head = "autoencoder" if self.setting.task == "compression" else model.head
        return dataclasses.replace(super().fit_to(model), head=head)

    def draw(self, count: int, seed: int, asked: bool) -> Sequences:
        """See `Generated`."""
        return mad_sequences(self.setting, count, seed, asked)

    def answered(self, graphdef: nnx.GraphDef, params: Any, sequences: Sequences) -> Numbers:
        """See `Generated`; macro_accuracy is the mean over groups of `MACRO_OVER` sequences, or over as many whole
        batches of another size as come near it. A last group that is smaller counts for less."""
        size = max(MACRO_OVER // self.batch_size, 1) * self.batch_size
        parts = [
            self.ask(graphdef, params, {name: rows[first : first + size] for name, rows in sequences.items()})
            for first in range(0, len(sequences["tokens"]), size)
        ]
        macro = [part.numbers["macro_accuracy"] for part in parts]
        together = Answers(*map(sum, zip(*parts, strict=True)))
        return together.numbers | {
            "macro_accuracy": float(np.average(macro, weights=[part.sequences for part in parts]))
        }

    def baseline(self) -> tuple[str, Numbers]:
        """See `Task`: a random one of the possible answers."""
        return f"an answer of {self.setting.task} at random", {self.setting.task: 1 / answers_of(self.setting)}


def answers_of(setting: MadSetting) -> int:
    """How many different tokens may be an answer."""
    size = setting.vocab_size
    if setting.task == "compression":
        return size
    if setting.task == "selective-copying":
        return size - 2
    if setting.task == "memorization":
        return (size - 1) // 2
    others = {"noisy-in-context-recall": setting.noise_tokens, "fuzzy-in-context-recall": 1}.get(setting.task, 0)
    return size - others - (size - others) // 2


@dataclass(frozen=True)
class MadOptions(StudyOptions):
    """Train small models on the six tasks of MAD."""

    models: tuple[str, ...] = (ATTENTION, "gated_deltanet", "titans")
    """Presets of memories, "attention" and "mamba"."""
    block: str = "lmm"
    """The block that holds the memory: lmm, mac, mag, mal, retrofit; "hope" for Hope."""
    segment: int = 8
    """Segment of mac, and window of mag and mal."""
    tasks: tuple[str, ...] = tuple(SETTINGS)
    """Tasks by name."""
    changes: bool = True
    """True: the baselines, and also the settings with one value changed; False: the baselines only."""
    learning_rates: tuple[float, ...] = (5e-4, 1e-3)
    """Learning rates tried; MAD's are 1e-4, 5e-4 and 1e-3."""
    weight_decays: tuple[float, ...] = (0.1,)
    """Weight decays tried; MAD's are 0 and 0.1."""
    epochs: int = 40
    """The most passes over the training sequences; MAD has 200."""
    batch_size: int = 128
    """Sequences of a step."""
    train_sequences: int | None = None
    """Training sequences of every setting; None: as many as in MAD."""
    longest: int | None = None
    """The greatest length, to which settings with longer sequences are shortened; None: the lengths of MAD."""
    held_out: int = 1280
    """Test sequences, and as many validation sequences."""
    dim: int = 128
    """Width of the residual stream."""
    depth: int = 2
    """Blocks, each a memory and a feed-forward layer."""
    head_dim: int = 32
    """Width of a head."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(expansion=2, chunk_size=8))
    """The other fields of the memories."""


@register_study("mad")
class MadStudy(Study):
    """The six tasks of MAD, one change at a time, macro-averaged."""

    options = MadOptions

    def defaults(self, said: MadOptions) -> MadOptions:
        """See `Study`."""
        default = MadOptions(quick=said.quick)
        if not said.quick:
            return default
        return dataclasses.replace(
            default, seeds=1, changes=False, learning_rates=(3e-3,), epochs=5, batch_size=16, train_sequences=800,
            longest=64, held_out=128, dim=64, head_dim=16,
        )  # fmt: skip

    def cells(self, options: MadOptions) -> list[Cell]:
        """See `Study`."""
        at_least_one(
            options, "models", "segment", "tasks", "learning_rates", "weight_decays", "epochs", "batch_size",
            "held_out", "dim", "depth", "head_dim",
        )  # fmt: skip
        models.check_blocks([options.block])
        models.check_presets(options.models, others=(ATTENTION, MAMBA))
        for name in options.tasks:
            if name not in SETTINGS:
                raise ConfigError(f"tasks has {name!r}; use {', '.join(SETTINGS)}{did_you_mean(name, SETTINGS)}")
        sizes = options.dim, options.depth, options.head_dim
        built = {
            name: models.small_model(name, options.block, *sizes, options.memory, segment=options.segment)
            for name in dict.fromkeys(options.models)
        }
        cells: list[Cell] = []
        for task, (change, rate, decay) in self.trained(options):
            names = {"task": task.setting.task, "change": change, "learning_rate": rate, "weight_decay": decay}
            cells += with_seeds(options, [({"model": name} | names, model) for name, model in built.items()], task)
        return cells

    def trained(self, options: MadOptions) -> list[tuple[Mad, tuple[str, float, float]]]:
        """Every task with its change, learning rate and weight decay.

        Raises:
          ConfigError: a setting has no sequence as short as `longest`, or not one batch to train on.
        """
        chosen = [
            (change, setting)
            for name in dict.fromkeys(options.tasks)
            for change, setting in (settings(name) if options.changes else {"baseline": SETTINGS[name]}).items()
        ]
        longest, count, batch_size = options.longest, options.train_sequences, options.batch_size
        least, name = max((setting.shortest, setting.task) for _, setting in chosen)
        if longest is not None and longest < least:
            raise ConfigError(f"longest is {longest}; use at least {least}, which {name} needs")
        if count is not None and count < batch_size:
            raise ConfigError(f"train_sequences is {count}; use at least {batch_size}, one batch of batch_size")
        fewest, name = min((setting.train_sequences, setting.task) for _, setting in chosen)
        if count is None and fewest < batch_size:
            raise ConfigError(f"batch_size is {batch_size}; use at most {fewest}, the training sequences of {name}")
        found = []
        for (change, setting), rate, decay in itertools.product(
            chosen, dict.fromkeys(options.learning_rates), dict.fromkeys(options.weight_decays)
        ):
            sequences = setting.train_sequences if count is None else count
            length = setting.length if longest is None else min(setting.length, longest)
            task = Mad(
                steps=options.epochs * (sequences // batch_size), batch_size=batch_size, learning_rate=rate,
                train_sequences=sequences // batch_size * batch_size, validation_sequences=options.held_out,
                test_sequences=options.held_out, weight_decay=decay,
                setting=dataclasses.replace(setting, train_sequences=sequences, length=length),
            )  # fmt: skip
            found.append((task, (change, rate, decay)))
        return found

    def columns(self, options: MadOptions) -> list[Column]:
        """See `Study`."""
        names = dict.fromkeys(options.tasks)
        return [*(Column(name, name.replace("in-context-", "")) for name in names), Column("mad", "mean")]

    def finish(self, options: MadOptions, rows: list[Row]) -> list[Row]:
        """See `Study`: a row per model; with each seed, a task's number is its mean over settings."""
        rows, found = best_of(rows, ("learning_rate", "weight_decay"), "validation"), []
        for name in dict.fromkeys(row.labels["model"] for row in rows):
            own = [row for row in rows if row.labels["model"] == name]
            numbers = {
                task: means_by_seed(row.numbers.get("macro_accuracy", []) for row in own if row.labels["task"] == task)
                for task in dict.fromkeys(options.tasks)
            }
            numbers["mad"] = means_by_seed(numbers.values())
            found.append(joined_row({"model": name}, own, numbers))
        return found

    def published(self, options: MadOptions) -> list[Baseline]:
        """See `Study`; only if the settings and numbers of training sequences are MAD's, however training differs."""
        as_it_is = options.changes and options.longest is None and options.train_sequences is None
        words = "200 epochs, best of six settings by test"
        return [(f"{name} ({words})", numbers) for name, numbers in PUBLISHED.items()] if as_it_is else []

    def notes(self, options: MadOptions) -> str:
        """See `Study`."""
        which = "all settings" if options.changes else "the baselines alone"
        cut = "" if options.longest is None else f", cut to {options.longest} tokens"
        return (
            f"{which}{cut}, {options.epochs} epochs at most; accuracy macro-averaged in batches of {MACRO_OVER}, rate "
            "and decay by validation"
        )

    def draw(self, options: MadOptions, rows: list[Row], file: Path, note: str) -> None:
        """See `Study`: bars by task, a colour per model."""
        columns = self.columns(options)
        with plots.figure(file, 2 + 1.5 * len(columns), 4, note=note) as axes:
            width = 0.8 / len(rows)
            for number, row in enumerate(rows):
                spreads = [row.spread(column.number) for column in columns]
                places = [place + (number - (len(rows) - 1) / 2) * width for place in range(len(columns))]
                known = [(place, value) for place, value in zip(places, spreads, strict=True) if value.count]
                axes.bar(
                    [place for place, _ in known], [value.mean for _, value in known], width,
                    yerr=[value.sd or 0 for _, value in known], capsize=2, label=row.labels["model"],
                )  # fmt: skip
            axes.set_xticks(range(len(columns)), [column.heading for column in columns], rotation=20)
            axes.set(ylabel="accuracy, mean over classes", ylim=(0, 1.03))
            axes.legend(fontsize="x-small")
