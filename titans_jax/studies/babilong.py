"""`titans study babilong`: BABILong as its authors fine-tune for it (arXiv 2406.10149), one model for every task.

A row is context, question, GEN, answer and the end of the text. The loss is taken only on the tokens after GEN, with
gradients through the whole row. Training is in stages of more and more segments: a sample has from 1 up to the stage's
number of segments, all equally likely, and a stage begins with the parameters of the previous stage that were best on
held-out stories. The test asks about stories of bAbI's test file in novels that no training row has, also in rows
longer than any training row; an answer is right if it is exact, letter by letter, up to the end of the text.

Rows of a stage are padded to its largest number of segments, so there is one compiled training step per stage.
Questions are read segment by segment with the state carried on, by one program for all lengths; full attention needs
one program per length.

Titans' figure 6b follows the same setup but is not comparable: its models are larger and pre-trained on text, its
novels and tokens differ, and its values are printed only in the figure. The differences from BABILong's code are: the
novels, and where their sentences end (see `titans_jax.evaluation.babi`); small models are trained from scratch;
validation stories are the last tenth of the train file, not the test file; training leaves out stories that the other
parts have too (a quarter of qa4's, otherwise less than one in two hundred); facts take at most a fifth of a row's
tokens, where the authors' scripts compare the number of facts with a fifth of the tokens; each sample draws one of the
stories that fit its length; and qa3 is trained on the 1,000 questions of bAbI's smaller train file where the archive
has no other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from titans_jax import plots
from titans_jax.config import ConfigError, MemoryConfig, ModelConfig, OptimizerConfig, did_you_mean
from titans_jax.evaluation.babilong import TASKS
from titans_jax.models import empty_state, granularity
from titans_jax.models.loss import Batch
from titans_jax.studies import models
from titans_jax.studies.babilong_rows import (
    FACTS,
    WORDS,
    Part,
    Questions,
    batch_of,
    fingerprint,
    is_exact,
    questions,
    tokenizer_of,
)
from titans_jax.studies.models import ATTENTION, WINDOW, WITHOUT_MEMORY, one_graph
from titans_jax.studies.study import Cell, Column, Study, StudyOptions, at_least_one, register_study, with_seeds
from titans_jax.studies.table import Row, draw_spreads
from titans_jax.studies.tasks import Numbers, Task
from titans_jax.training.fit import Selection


@dataclass(frozen=True)
class Babilong(Task):
    """One task of BABILong, learned in stages of ever more segments."""

    name: ClassVar[str] = "babilong"

    steps: int = 2000
    """The most training steps of a stage."""
    batch_size: int = 32
    """Samples of a step."""
    learning_rate: float = 1e-3
    """Peak learning rate of a stage: after a linear warm-up in a tenth of its steps, it falls linearly to 0."""
    weight_decay: float = 0.01
    """Decoupled decay of matrices."""
    question: str = "qa1"
    """A task of bAbI, qa1 to qa5."""
    folder: str = "data"
    """The folder with babi/ and books/, as `titans data fetch` lays them out."""
    tokenizer: str = WORDS
    """"words" (the words of the training stories and the most frequent ones of the novels, 2,048 tokens), "byte", or a
    path."""
    segment: int = 512
    """Tokens of a segment, which is also the reach of attention in mac, mag, mal and "window"."""
    stages: tuple[int, ...] = (1, 2, 4, 8)
    """Largest number of segments of each stage; BABILong's are 1, 2, 4, 6, 8, 16, 32."""
    patience: int = 15
    """A stage ends after this many validations in a row without a better one."""
    validate_every: int = 100
    """Steps between two validations; the last step of a stage is validated too."""
    validation_samples: int = 128
    """Questions of a validation, all of the stage's largest number of segments."""
    test_segments: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Segments of the test rows, one length after another."""
    samples: int = 256
    """Test questions at each of these lengths, the same for all models."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """AdamW with gradients clipped to norm 1 and a learning rate that falls linearly to 0."""
        return dataclasses.replace(
            super().optimizer, schedule="linear", final_learning_rate_ratio=0.0, weight_decay=self.weight_decay,
            beta2=0.999,
        )  # fmt: skip

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest training row."""
        return max(self.stages) * self.segment

    def of(self, part: Part) -> Questions:
        """The questions of a part of the data."""
        return questions(self.folder, self.tokenizer, self.question, part)

    def fit_to(self, model: ModelConfig) -> ModelConfig:
        """See `Task`; segments are those of the model's attention too."""
        size = -(-tokenizer_of(self.folder, self.tokenizer, self.question).vocab_size // 64) * 64
        return dataclasses.replace(model, vocab_size=size, segment=self.segment, window=self.segment)

    def check(self, model: ModelConfig) -> None:
        """See `Task`."""
        shortest = max(self.of(part).shortest for part in ("train", "validation", "test"))
        if self.segment < shortest:
            raise ConfigError(
                f"segment is {self.segment} tokens of {self.tokenizer!r}, too few for the facts of any story of "
                f"{self.question}, which may be a {FACTS}th of it; use at least {shortest}"
            )
        super().check(model)
        for part in ("train", "test"):  # the first row fails if the novels have no sentence that is long enough
            try:
                self.of(part).exam(self.segment, 1)
            except ValueError as error:
                raise ConfigError(f"folder is {self.folder!r}: {error}") from error

    def fingerprint(self) -> str:
        """See `Task`."""
        return fingerprint(self.folder, self.question)

    def trainings(self) -> list[Task]:
        """See `Task`: one training per stage."""
        return [dataclasses.replace(self, stages=(most,)) for most in self.stages]

    def batches(self, seed: int) -> Iterator[Batch]:
        """See `Task`: rows of the last stage, each sample of 1 up to its number of segments."""
        most, asked = self.stages[-1], self.of("train")
        chance = random.Random(f"{self.question} {most} {seed}")
        while True:
            lengths = [self.segment * chance.randint(1, most) for _ in range(self.batch_size)]
            yield batch_of([asked.draw(chance, length) for length in lengths], most * self.segment)

    def selection(self) -> Selection | None:
        """See `Task`: by exact match at the last stage's largest number of segments."""
        most = self.stages[-1]

        def score(graphdef: nnx.GraphDef, params: Any) -> float:
            return self.exact_match(graphdef, params, "validation", most, self.validation_samples)

        return Selection(score, min(self.validate_every, self.steps), self.patience, enough=1.0)

    def exact_match(self, graphdef: nnx.GraphDef, params: Any, part: Part, segments: int, count: int) -> float:
        """Share of exact answers to `count` questions in rows of `segments` segments.

        The row contains the right answer, and the likeliest token after each of its tokens is compared. This gives the
        same score as greedy decoding: up to its first wrong token the model would generate the same tokens, and one
        wrong token makes the answer wrong.
        """
        exam, length = self.of(part).exam(segments * self.segment, count), segments * self.segment
        known = tokenizer_of(self.folder, self.tokenizer, self.question)
        empty, read = make_reader(graphdef)
        params, right = jax.device_put(params, jax.local_devices()[0]), 0
        for first in range(0, count, self.batch_size):
            some = exam[first : first + self.batch_size]
            filled = [*some, *[some[0]] * (self.batch_size - len(some))]  # all batches have one shape
            tokens, state, said = batch_of(filled, length)["tokens"], empty(params, len(filled), length), []
            for start in range(0, length, self.segment):
                likely, state = read(params, state, tokens[:, start : start + self.segment])
                said.append(likely)
            for sample, row in zip(some, np.concatenate(jax.device_get(said), axis=1), strict=False):
                right += is_exact(known, row[sample.gen : len(sample.tokens) - 1], sample.answer)
        return right / count

    def measure(self, graphdef: nnx.GraphDef, params: Any) -> Numbers:
        """exact_match_N: share of right answers to test questions in rows of N segments, for each of test_segments."""
        return {
            f"exact_match_{segments}": self.exact_match(graphdef, params, "test", segments, self.samples)
            for segments in dict.fromkeys(self.test_segments)
        }

    def baseline(self) -> tuple[str, Numbers]:
        """See `Task`: the train file's most frequent answer, to the same questions."""
        ((most, _),) = Counter(story.answer for story in self.of("train").stories).most_common(1)
        asked, numbers = self.of("test"), {}
        for segments in dict.fromkeys(self.test_segments):
            answers = [asked.stories[n].answer for n in asked.examined(segments * self.segment, self.samples)]
            numbers[f"exact_match_{segments}"] = answers.count(most) / len(answers)
        return f"the most frequent answer of {self.question}, {most}", numbers


@one_graph
def make_reader(graphdef: nnx.GraphDef) -> tuple[Callable[..., Any], Callable[..., tuple[jax.Array, Any]]]:
    """Compiled (params, rows, length) -> an empty state, and (params, state, tokens [rows, time]) -> the likeliest next
    tokens, int32 [rows, time], and the state after `tokens`."""

    def read(params: Any, state: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(graphdef, params)
        logits, state = model.extend(tokens, state, closed=tokens.shape[1] % granularity(model.config) == 0)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), state

    return jax.jit(functools.partial(empty_state, graphdef), static_argnums=(1, 2)), jax.jit(read)


@dataclass(frozen=True)
class BabilongOptions(StudyOptions):
    """Train small models on questions about facts in novels, and test them on longer and longer texts."""

    tasks: tuple[str, ...] = TASKS
    """Tasks of bAbI, qa1 to qa5, each with models of its own."""
    blocks: tuple[str, ...] = ("lmm", "mac", "mag", "mal")
    """Blocks that hold the memories."""
    presets: tuple[str, ...] = ("titans",)
    """Memories, each in every block."""
    reference: tuple[str, ...] = ("gated_deltanet", WINDOW, ATTENTION)
    """Models to compare with: memories, in the block lmm only, and without a memory, "window", "attention",
    "window_conv" and "attention_conv" (with convolutions in the attention), "mamba" and "samba"."""
    dim: int = 128
    """Width of the residual stream."""
    depth: int = 2
    """Blocks."""
    head_dim: int = 32
    """Width of a head."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(depth=2, expansion=2))
    """The other fields of the memories."""
    babilong: Babilong = field(default_factory=Babilong)
    """Rows and training; `tasks` replaces its question."""


@register_study("babilong")
class BabilongStudy(Study):
    """Questions on facts that are scattered over novels, learned in stages, asked at and beyond the trained lengths."""

    options = BabilongOptions

    def defaults(self, said: BabilongOptions) -> BabilongOptions:
        """See `Study`."""
        default = BabilongOptions(quick=said.quick)
        if not said.quick:
            return default
        short = Babilong(
            steps=400, batch_size=16, learning_rate=3e-3, segment=64, stages=(1, 2), validate_every=50,
            validation_samples=64, test_segments=(1, 2, 4, 8), samples=128,
        )  # fmt: skip
        return dataclasses.replace(
            default, seeds=1, tasks=("qa1",), blocks=("lmm",), reference=("gated_deltanet", ATTENTION), dim=64,
            head_dim=16, babilong=short,
        )  # fmt: skip

    def cells(self, options: BabilongOptions) -> list[Cell]:
        """See `Study`."""
        at_least_one(options, "tasks", "dim", "depth", "head_dim")
        at_least_one(
            options.babilong, "steps", "batch_size", "segment", "patience", "validate_every", "validation_samples",
            "stages", "test_segments", "samples",
        )  # fmt: skip
        check_segments(options.babilong)
        for name in options.tasks:
            if name not in TASKS:
                raise ConfigError(f"tasks has {name!r}; use {', '.join(TASKS)}{did_you_mean(name, TASKS)}")
        if not (options.blocks and options.presets) and not options.reference:
            raise ConfigError("blocks or presets, and reference, are empty; name at least one model")
        models.check_presets(options.presets)
        models.check_presets(options.reference, others=WITHOUT_MEMORY)
        models.check_blocks(options.blocks)
        references = models.in_blocks(("lmm",), options.reference)
        built = {
            (block, preset): models.small_model(
                preset, block, options.dim, options.depth, options.head_dim, options.memory
            )
            for block, preset in (*itertools.product(options.blocks, options.presets), *references)
        }
        cells: list[Cell] = []
        for name in dict.fromkeys(options.tasks):
            kinds = [
                ({"task": name, "block": block, "preset": preset}, model) for (block, preset), model in built.items()
            ]
            cells += with_seeds(options, kinds, dataclasses.replace(options.babilong, question=name))
        return cells

    def columns(self, options: BabilongOptions) -> list[Column]:
        """See `Study`."""
        return [Column(f"exact_match_{n}", f"at {n}") for n in sorted(set(options.babilong.test_segments))]

    def notes(self, options: BabilongOptions) -> str:
        """See `Study`."""
        task = options.babilong
        return (
            f"share of exact answers in rows of so many segments of {task.segment} tokens ({task.tokenizer}), trained "
            f"on up to {' then '.join(map(str, task.stages))}, {task.steps} steps of {task.batch_size} a stage at most"
        )

    def draw(self, options: BabilongOptions, rows: list[Row], file: Path, note: str) -> None:
        """See `Study`: exact match against segments, a panel per task, a line per model."""
        from matplotlib import colormaps

        counts, tasks = (
            sorted(set(options.babilong.test_segments)),
            [*dict.fromkeys(row.labels["task"] for row in rows)],
        )
        names = [*dict.fromkeys((row.labels["block"], row.labels["preset"]) for row in rows)]
        height = 4.5 * -(-len(tasks) // 4)
        with plots.panels(file, len(tasks), 3.5 + 3.5 * min(len(tasks), 4), height, note=note) as panels:
            for axes, name in zip(panels, tasks, strict=True):
                for row in (row for row in rows if row.labels["task"] == name):
                    kind = row.labels["block"], row.labels["preset"]
                    draw_spreads(
                        axes, {count: row.spread(f"exact_match_{count}") for count in counts},
                        color=colormaps["tab10"].colors[names.index(kind) % 10], label=" ".join(kind).strip(),
                    )  # fmt: skip
                _, chance = dataclasses.replace(options.babilong, question=name).baseline()
                axes.plot(counts, [chance[f"exact_match_{count}"] for count in counts], ":", color="gray")
                axes.axvline(max(options.babilong.stages), color="gray", linewidth=0.8)
                axes.set_xscale("log", base=2)
                axes.set_xticks(counts, counts)
                axes.set(title=name, ylim=(0, 1.03))
                axes.set_xlabel(f"segments of {options.babilong.segment} tokens (vertical: trained on)")
            panels[0].set_ylabel("exact answers (dotted: the most frequent one)")
            panels[0].legend(fontsize="x-small")


def check_segments(task: Babilong) -> None:
    """Refuse stages that do not grow, and rows of no segment.

    Raises:
      ConfigError: names the field.
    """
    if task.stages[0] < 1 or any(after <= before for before, after in itertools.pairwise(task.stages)):
        raise ConfigError(f"stages is {task.stages}; use numbers of segments that grow, such as 1 2 4")
    if min(task.test_segments) < 1:
        raise ConfigError(f"test_segments has {min(task.test_segments)}; use at least 1")
