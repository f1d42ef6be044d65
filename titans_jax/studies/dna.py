"""`titans study dna`: classification of DNA sequences, one token per base, from the mean over positions.

It reads the sets of GUE with their train, dev and test parts, scored by Matthews' correlation as in GUE, and by
accuracy, and sets of GenomicsBenchmarks where their files are at hand. The parameters that are tested are those of the
epoch that is best on the dev part (or, where there is none, on a held-out tenth of train); HyenaDNA, whose protocol
Titans follows, takes the epoch that is best on the test part. GUE's parts are used as they are: of the test sequences
16 of 613 of prom_core_tata, 43 of 5,920 of prom_core_all, 30 of 5,307 of prom_core_notata, 6 of 613 of prom_300_tata
and 1 of 1,000 of tf/1 are in the training part too. With pretrain_steps a model first learns to predict the next base
of the training sequences. There are 6 symbols, four bases, padding and unknown (HyenaDNA: 12), and 20 epochs
(HyenaDNA: 100). The published numbers in the table are not comparable: for GUE they are DNABERT-2's, which has 117
million parameters and is pre-trained; for GenomicsBenchmarks they are table 4 of Titans, whose models were pre-trained
on the human genome.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from titans_jax import plots, sharding
from titans_jax.config import ConfigError, MemoryConfig, ModelConfig, OptimizerConfig
from titans_jax.data.dna import PAD, VOCABULARY, Dataset, Split, load_dataset, matthews_correlation
from titans_jax.models.loss import Batch
from titans_jax.studies import models
from titans_jax.studies.models import ATTENTION, MAMBA, one_graph
from titans_jax.studies.study import Cell, Column, Study, StudyOptions, at_least_one, register_study, with_seeds
from titans_jax.studies.table import Baseline, Row
from titans_jax.studies.tasks import Numbers, Task
from titans_jax.training.fit import Selection, fit

SETS = (
    "tf/0", "tf/1", "tf/2", "prom/prom_core_all", "prom/prom_core_notata", "prom/prom_core_tata", "prom/prom_300_tata",
    "mouse/0", "mouse/2", "mouse/3",
)  # fmt: skip
"""Sets of GUE."""

PUBLISHED = {
    "tf/0": 0.7199, "tf/1": 0.7606, "tf/2": 0.6652, "prom/prom_core_all": 0.6937, "prom/prom_core_notata": 0.6804,
    "prom/prom_core_tata": 0.7417, "prom/prom_300_tata": 0.7159, "mouse/0": 0.5676, "mouse/2": 0.7932,
    "mouse/3": 0.6647,
}  # fmt: skip
"""Matthews' correlation of DNABERT-2 on the test parts (arXiv 2306.15006)."""

TABLE_4 = {
    "human_enhancers_cohn": {"HyenaDNA": 0.742, "Transformer++": 0.734, "Mamba": 0.730, "Titans LMM": 0.752},
    "human_enhancers_ensembl": {"HyenaDNA": 0.892, "Transformer++": 0.895, "Titans LMM": 0.896},
    "human_ensembl_regulatory": {"HyenaDNA": 0.938, "Transformer++": 0.899, "Titans LMM": 0.893},
    "human_nontata_promoters": {"HyenaDNA": 0.966, "Transformer++": 0.944, "Mamba": 0.966, "Titans LMM": 0.966},
    "human_ocr_ensembl": {"HyenaDNA": 0.809, "Transformer++": 0.795, "Titans LMM": 0.799},
}
"""Accuracies on sets of GenomicsBenchmarks, as table 4 of Titans prints them."""


@dataclass(frozen=True)
class Dna(Task):
    """Classification of DNA sequences."""

    name: ClassVar[str] = "dna"

    batch_size: int = 128
    """Sequences of a step."""
    learning_rate: float = 6e-4
    """Peak of the cosine schedule."""
    data: str = "prom/prom_core_notata"
    """A set by name."""
    folder: str = "data/genomics"
    """The folder of the sets."""
    pretrain_steps: int = 0
    """Steps of next-base prediction on the training sequences, before the classification is learned."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """As HyenaDNA: AdamW, decay 0.1, a warm-up in a hundredth of the steps, a cosine to a tenth of the peak."""
        return dataclasses.replace(super().optimizer, warmup_steps=self.steps // 100, beta2=0.999)

    @property
    def dataset(self) -> Dataset:
        """The sequences of all parts."""
        return load_dataset(self.data, self.folder)

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return self.dataset.length

    def fit_to(self, model: ModelConfig) -> ModelConfig:
        """See `Task`."""
        head = f"classifier(classes={self.dataset.classes})"
        return dataclasses.replace(model, vocab_size=VOCABULARY, head=head)

    def check(self, model: ModelConfig) -> None:
        """See `Task`."""
        super().check(model)
        if self.pretrain_steps < 0:
            raise ConfigError(f"pretrain_steps is {self.pretrain_steps}; use at least 0")

    def fingerprint(self) -> str:
        """See `Task`."""
        return self.dataset.fingerprint

    @property
    def tokens_before(self) -> int:
        """See `Task`."""
        return self.pretrain_steps * self.batch_size * self.sequence_length

    def batches(self, seed: int) -> Iterator[Batch]:
        """See `Task`: the training sequences in another order every epoch."""
        rows, generator = self.dataset.rows("train"), np.random.default_rng(seed)
        order = np.zeros(0, np.int64)
        while True:
            while len(order) < self.batch_size:
                order = np.concatenate([order, generator.permutation(len(rows["targets"]))])
            which, order = order[: self.batch_size], order[self.batch_size :]
            yield {name: values[which] for name, values in rows.items()}

    def start(self, model: ModelConfig, seed: int) -> Any:
        """See `Task`: the parameters after next-base prediction."""
        if not self.pretrain_steps:
            return None
        before = dataclasses.replace(model, head="language_model")
        batches = (next_bases(batch) for batch in self.batches(seed))
        optimizer = dataclasses.replace(self.optimizer, warmup_steps=self.pretrain_steps // 100)
        return fit(before, optimizer, batches, self.pretrain_steps, seed).params

    def selection(self) -> Selection | None:
        """See `Task`: by Matthews' correlation on the dev part, once an epoch."""

        def score(graphdef: nnx.GraphDef, params: Any) -> float:
            return self.scores(graphdef, params, "validation")["mcc"]

        every = max(len(self.dataset.rows("train")["targets"]) // self.batch_size, 1)
        return Selection(score, min(every, self.steps))

    def scores(self, graphdef: nnx.GraphDef, params: Any, split: Split) -> Numbers:
        """mcc (Matthews' correlation) and accuracy over all sequences of a split."""
        rows, step = self.dataset.rows(split), make_class_step(graphdef)
        count, classes, answers = len(rows["targets"]), self.dataset.classes, []
        for first in range(0, count, self.batch_size):
            # The last batch is filled up with its first row, so that all have one shape.
            which = np.arange(first, first + self.batch_size)
            which = np.where(which < count, which, first)
            batch = {name: values[which] for name, values in rows.items()}
            answers.append(np.asarray(step(params, sharding.spread(batch, None)[0])))
        confusion = np.zeros((classes, classes))
        np.add.at(confusion, (rows["targets"], np.concatenate(answers)[:count]), 1)
        return {"mcc": matthews_correlation(confusion), "accuracy": float(np.trace(confusion) / count)}

    def measure(self, graphdef: nnx.GraphDef, params: Any) -> Numbers:
        """mcc and accuracy on the test part; "validation": the mcc on the dev part, by which parameters are chosen."""
        return self.scores(graphdef, params, "test") | {
            "validation": self.scores(graphdef, params, "validation")["mcc"]
        }

    def baseline(self) -> tuple[str, Numbers]:
        """See `Task`: the most frequent class of the training part."""
        train, test = (self.dataset.rows(split)["targets"] for split in ("train", "test"))
        most = np.argmax(np.bincount(train))
        return f"the most frequent class of {self.data}", {"mcc": 0.0, "accuracy": float(np.mean(test == most))}


def next_bases(batch: Batch) -> Batch:
    """A batch for next-base prediction: the targets are the next tokens, none at padding."""
    tokens = batch["tokens"]
    ahead = np.concatenate([tokens[:, 1:], np.full((len(tokens), 1), PAD, np.int32)], axis=1)
    targets = np.where((tokens == PAD) | (ahead == PAD), -1, ahead)
    return {"tokens": tokens, "targets": targets, "segment_ids": None}


@one_graph
def make_class_step(graphdef: nnx.GraphDef) -> Callable[[Any, Batch], jax.Array]:
    """Compiled (params, batch) -> the class answered for every row, int32 [rows]."""

    @jax.jit
    def class_step(params: Any, batch: Batch) -> jax.Array:
        return jnp.argmax(nnx.merge(graphdef, params)(batch["tokens"], batch["segment_ids"]), axis=-1)

    return class_step


@dataclass(frozen=True)
class DnaOptions(StudyOptions):
    """Train small models to tell classes of DNA sequences apart."""

    models: tuple[str, ...] = ("titans", "gated_deltanet", "mamba2", ATTENTION)
    """Presets of memories, "attention" and "mamba"."""
    block: str = "lmm"
    """The block that holds the memories."""
    data: tuple[str, ...] = SETS
    """Sets by name: folders with train, dev and test files, below `folder`, its gue/ or its genomic_benchmarks/."""
    folder: str = "data/genomics"
    """The folder of the sets."""
    epochs: int = 20
    """Passes over the training sequences; HyenaDNA has 100."""
    pretrain_epochs: int = 0
    """Passes over them before that, to learn to predict the next base."""
    batch_size: int = 128
    """Sequences of a step."""
    learning_rate: float = 6e-4
    """Peak of the cosine schedule."""
    dim: int = 128
    """Width of the residual stream."""
    depth: int = 2
    """Blocks."""
    head_dim: int = 32
    """Width of a head."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(expansion=2))
    """The other fields of the memories."""


@register_study("dna")
class DnaStudy(Study):
    """Classes of DNA sequences: Matthews' correlation and accuracy on GUE, chosen on its dev parts."""

    options = DnaOptions

    def defaults(self, said: DnaOptions) -> DnaOptions:
        """See `Study`."""
        default = DnaOptions(quick=said.quick)
        if not said.quick:
            return default
        return dataclasses.replace(
            default, seeds=1, data=("prom/prom_core_tata", "mouse/2"), models=("titans", "gated_deltanet", ATTENTION),
            epochs=6, batch_size=64, learning_rate=3e-3, dim=32, head_dim=16, depth=1,
        )  # fmt: skip

    def cells(self, options: DnaOptions) -> list[Cell]:
        """See `Study`."""
        at_least_one(options, "models", "data", "epochs", "batch_size", "dim", "depth", "head_dim")
        models.check_presets(options.models, others=(ATTENTION, MAMBA))
        models.check_blocks([options.block])
        if options.pretrain_epochs < 0:
            raise ConfigError(f"pretrain_epochs is {options.pretrain_epochs}; use at least 0")
        cells: list[Cell] = []
        for name in dict.fromkeys(options.data):
            count = len(load_dataset(name, options.folder).rows("train")["targets"])
            epoch = max(count // options.batch_size, 1)
            task = Dna(
                steps=options.epochs * epoch, batch_size=options.batch_size, learning_rate=options.learning_rate,
                data=name, folder=options.folder, pretrain_steps=options.pretrain_epochs * epoch,
            )  # fmt: skip
            kinds = [
                ({"data": name, "model": model}, models.small_model(
                    model, options.block, options.dim, options.depth, options.head_dim, options.memory
                ))
                for model in dict.fromkeys(options.models)
            ]  # fmt: skip
            cells += with_seeds(options, kinds, task)
        return cells

    def columns(self, options: DnaOptions) -> list[Column]:
        """See `Study`."""
        return [Column("mcc", "Matthews"), Column("accuracy", "accuracy")]

    def published(self, options: DnaOptions) -> list[Baseline]:
        """See `Study`."""
        found: list[Baseline] = []
        for name in dict.fromkeys(options.data):
            if name in PUBLISHED:
                found.append((f"DNABERT-2 (117M, pre-trained) as printed, {name}", {"mcc": PUBLISHED[name]}))
            words = f"(pre-trained, chosen on the test set there) as Titans prints it, {name}"
            found += [(f"{model} {words}", {"accuracy": one}) for model, one in TABLE_4.get(name, {}).items()]
        return found

    def notes(self, options: DnaOptions) -> str:
        """See `Study`."""
        before = f"after {options.pretrain_epochs} of next bases" if options.pretrain_epochs else "from scratch"
        return (
            f"{options.epochs} epochs {before} (HyenaDNA: 100), {VOCABULARY} symbols (12); the epoch that is best on "
            "the dev part, told on the test part"
        )

    def draw(self, options: DnaOptions, rows: list[Row], file: Path, note: str) -> None:
        """See `Study`: bars of Matthews' correlation by set, a colour per model."""
        sets, names = ([*dict.fromkeys(row.labels[name] for row in rows)] for name in ("data", "model"))
        with plots.figure(file, 2 + 1.6 * len(sets), 4, note=note) as axes:
            width = 0.8 / len(names)
            for (number, model), (place, data) in itertools.product(enumerate(names), enumerate(sets)):
                own = [row for row in rows if (row.labels["data"], row.labels["model"]) == (data, model)]
                value = own[0].spread("mcc")
                if value.count:
                    axes.bar(
                        place + (number - (len(names) - 1) / 2) * width, value.mean, width, yerr=value.sd or 0,
                        capsize=2, color=f"C{number}", label=model if place == 0 else None,
                    )  # fmt: skip
            axes.set_xticks(range(len(sets)), sets, rotation=20)
            axes.set_ylabel("Matthews' correlation, test part")
            axes.set_ylim(top=1)  # room for the legend
            axes.legend(fontsize="x-small")
