"""`titans study state_tracking`: which memories can follow a group's running product, at lengths they never saw.

Small models learn word problems (titans_jax.data.word_problems) of Z2, which is parity, S3, A5 and S5 in rows of one
length and are tested on longer ones. The table also has the prediction of theory for rows of any length:

- A recurrence whose transition has no eigenvalue that is negative or complex cannot do parity in finite precision
  (Grazzi et al., arXiv 2411.12537, theorem 1); S3, A5 and S5 contain Z2, so it can do none of them. That holds for
  every memory that forgets by positive factors, and for one delta step of at most 1.
- n delta steps of up to 2 are n reflections a token: parity needs one, S3 and A5 need two, S5 needs four (DeltaProduct,
  arXiv 2502.10297); three layers of two steps, or four layers of one step, can do any group.
- A transformer of fixed depth is in TC0, and S5 and A5 are not, if TC0 is not NC1 (Merrill et al., arXiv 2404.08819);
  for parity and S3, theory leaves open whether training finds a solution.
- For memories behind a norm or a non-linearity no theorem is known ("open"): Titans states its theorem 4.1 without a
  proof.

Test rows differ from one another, and none of them is in validation or training. The training differs from
DeltaProduct's: all rows are new, where DeltaProduct repeats 100,000 for at most 100 epochs; 4 heads of 32 and 512 rows
a step, not 8 and 2,048; AdamW with a decay of 0.1 and beta2 0.95, not 1e-6 and 0.999, with a warm-up in a tenth of the
steps and gradients clipped at norm 1; and a training ends at a validation accuracy of 0.999 over positions, not of 0.99
over whole rows.
"""

import dataclasses
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from flax import nnx

from titans_jax import plots
from titans_jax.config import ConfigError, MemoryConfig, ModelConfig, did_you_mean
from titans_jax.data.word_problems import group, word_problems
from titans_jax.memory.rule.presets import PRESETS
from titans_jax.studies import models
from titans_jax.studies.generated import TEST_SEED, VALIDATION_SEED, Generated, Sequences
from titans_jax.studies.models import ATTENTION, MAMBA
from titans_jax.studies.study import Cell, Column, Study, StudyOptions, at_least_one, register_study, with_seeds
from titans_jax.studies.table import Row, draw_spreads
from titans_jax.studies.tasks import Numbers

SOLVED = 0.99
"""Share of right answers at which a word problem counts as solved."""

REFLECTIONS = {"Z2": 1, "S3": 2, "A5": 2, "S5": 4}
"""How many reflections are needed to write any element of a group as their product."""

POSITIVE = (
    "retnet", "linear_attention", "dfw", "lightning_attention", "gla", "mamba2", "hgrn2", "deltanet", "longhorn",
    "gated_deltanet", "mesa", "kimi_delta_attention", "gated_deltanet_2", "comba", "mamba",
)  # fmt: skip
"""Memories whose transitions have eigenvalues in [0, 1] only."""

RULES: dict[str, dict[str, object]] = {
    **{name: {"preset": name} for name in PRESETS if name != "delta_product"},
    **{f"delta_product {steps}": {"preset": "delta_product", "steps": steps} for steps in (1, 2, 4)},
    "titans linear": {
        "preset": "titans", "architecture": "linear", "momentum": False, "forget_to": "zero", "tie_keys": False,
    },
    **{f"titans chunk {size}": {"preset": "titans", "chunk_size": size} for size in (4, 16)},
}  # fmt: skip
"""Fields of the memory by the name of a rule. A linear Titans memory, whose keys come from one token each (tie_keys
False), has steps of up to nearly 2 in units of the error, so that it can reflect."""
EVERY = (*RULES, ATTENTION, MAMBA)
"""All rules that the table can have."""


def reflections(rule: str) -> int:
    """How many reflections a rule applies to the memory per token, 0 where it applies none."""
    return 1 if rule == "titans linear" else int(rule.split()[1]) if rule.startswith("delta_product") else 0


def theory(rule: str, group: str, depth: int) -> str:
    """ "yes", "no" or "open": whether `depth` layers of a rule can do a group's word problem at any length."""
    steps = reflections(rule)
    if steps:
        if group in REFLECTIONS and steps >= REFLECTIONS[group]:
            return "yes"
        return "yes" if depth >= (4 if steps == 1 else 3) else "no" if group in REFLECTIONS and depth == 1 else "open"
    even = group in REFLECTIONS
    if rule in POSITIVE:
        return "no" if even else "open"
    return "no" if rule == ATTENTION and group in ("A5", "S5") else "open"


@dataclass(frozen=True)
class WordProblem(Generated):
    """The running product of a sequence of group elements, asked at every position."""

    name: ClassVar[str] = "word_problem"
    enough: ClassVar[float] = 0.999

    group: str = "S3"
    """Z2 (parity), S3, A5, S5, Z60, A4_x_Z5, ..."""
    length: int = 128
    """Elements of a training row."""
    test_lengths: tuple[int, ...] = (128, 256, 512)
    """Elements of the test rows, one length after another."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a training row."""
        return self.length

    @property
    def vocabulary(self) -> int:
        """See `Generated`: one token per element."""
        return group(self.group).order

    def check(self, model: ModelConfig) -> None:
        """See `Task`."""
        for name, length in (("length", self.length), *(("test_lengths", length) for length in self.test_lengths)):
            if length < 1:
                raise ConfigError(f"{name} has {length}; use at least 1")
            there, asked = group(self.group).order ** length, self.test_sequences + self.validation_sequences
            if there <= asked:
                raise ConfigError(
                    f"{name} has {length}, of which {self.group} has {there} rows; use a greater length or group, "
                    f"with more than the {asked} of test_sequences and validation_sequences"
                )
        super().check(model)

    def draw(self, count: int, seed: int, asked: bool) -> Sequences:
        """See `Generated`: validation rows (`asked`) are never test rows; training rows are neither."""
        known = [self.tested(self.length)] if self.length in self.test_lengths else []
        if not asked and self.validation_sequences:
            known.append(self.held_out(VALIDATION_SEED))
        apart = np.concatenate([rows["tokens"] for rows in known]) if known else None
        return word_problems(group(self.group), self.length, count, seed, apart, distinct=asked)

    def tested(self, length: int) -> Sequences:
        """The test rows of a length, no two the same."""
        return word_problems(group(self.group), length, self.test_sequences, TEST_SEED, distinct=True)

    def measure(self, graphdef: nnx.GraphDef, params: object) -> Numbers:
        """accuracy_L, cumulative_accuracy_L, sequence_accuracy_L at each length L: right positions, positions before a
        row's first mistake, and rows without one."""
        names, numbers = ("accuracy", "cumulative_accuracy", "sequence_accuracy"), {}
        for length in self.test_lengths:
            found = self.ask(graphdef, params, self.tested(length)).numbers
            numbers |= {f"{name}_{length}": found[name] for name in names}
        return numbers

    def baseline(self) -> tuple[str, Numbers]:
        """See `Task`: all products are equally frequent."""
        chance = 1 / self.vocabulary
        names = {f"accuracy_{length}": chance for length in self.test_lengths}
        return f"an element of {self.group} at random", names


@dataclass(frozen=True)
class StateTrackingOptions(StudyOptions):
    """Train small models on word problems of groups, and test them at greater lengths."""

    rules: tuple[str, ...] = EVERY
    """Memories by preset; "delta_product 1", 2 and 4 by their steps; "titans linear"; "titans chunk 4" and 16;
    "attention"; "mamba"."""
    block: str = "lmm"
    """The block that holds the memory: lmm, mac, mag, mal, retrofit; "hope" for Hope."""
    segment: int = 8
    """Segment of mac, and window of mag and mal."""
    groups: tuple[str, ...] = ("Z2", "S3", "A5", "S5")
    """Groups by name; Z2 is parity."""
    dim: int = 128
    """Width of the residual stream."""
    depth: int = 1
    """Blocks."""
    head_dim: int = 32
    """Width of a head."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(expansion=2, chunk_size=1))
    """The other fields of the memories. With chunks of one token every write uses the current memory."""
    task: WordProblem = field(
        default_factory=lambda: WordProblem(
            steps=5000, batch_size=512, learning_rate=1e-3, validation_sequences=512, test_sequences=1024
        )
    )
    """Rows and training; `groups` replaces its group."""


@register_study("state_tracking")
class StateTrackingStudy(Study):
    """Word problems of Z2 (parity), S3, A5 and S5: which memories solve them, up to which length, and the theory."""

    options = StateTrackingOptions

    def defaults(self, said: StateTrackingOptions) -> StateTrackingOptions:
        """See `Study`."""
        default = StateTrackingOptions(quick=said.quick)
        if not said.quick:
            return default
        task = WordProblem(
            steps=600, batch_size=64, learning_rate=3e-3, length=24, test_lengths=(24, 48, 96),
            validation_sequences=64, test_sequences=256,
        )  # fmt: skip
        rules = ("mamba2", "gated_deltanet", "delta_product 1", "delta_product 2", "titans linear", "titans", ATTENTION)
        return dataclasses.replace(
            default,
            seeds=1,
            rules=rules,
            groups=("Z2", "S3", "A5"),
            dim=64,
            head_dim=16,
            task=task,
            memory=MemoryConfig(expansion=1, chunk_size=1),
        )

    def cells(self, options: StateTrackingOptions) -> list[Cell]:
        """See `Study`."""
        at_least_one(options, "rules", "segment", "groups", "dim", "depth", "head_dim")
        models.check_blocks([options.block])
        if not options.task.test_lengths:
            raise ConfigError("task.test_lengths is empty; name at least one, such as 256")
        for name in options.rules:
            if name not in EVERY:
                raise ConfigError(f"rules has {name!r}; use {', '.join(EVERY)}{did_you_mean(name, EVERY)}")
        cells: list[Cell] = []
        sizes = options.dim, options.depth, options.head_dim
        for name in dict.fromkeys(options.groups):
            task = dataclasses.replace(options.task, group=name)
            kinds = []
            for rule in dict.fromkeys(options.rules):
                fields = RULES.get(rule, {"preset": rule})
                memory = dataclasses.replace(options.memory, **{k: v for k, v in fields.items() if k != "preset"})
                model = models.small_model(fields["preset"], options.block, *sizes, memory, segment=options.segment)
                said = theory(rule, name, options.depth)
                kinds.append(({"group": name, "rule": rule, "theory": said}, model))
            cells += with_seeds(options, kinds, task)
        return cells

    def columns(self, options: StateTrackingOptions) -> list[Column]:
        """See `Study`."""
        lengths = dict.fromkeys(options.task.test_lengths)
        last = max(lengths)
        return [
            *(Column(f"accuracy_{length}", f"right at {length}") for length in lengths),
            Column(f"cumulative_accuracy_{last}", f"before a mistake at {last}"),
            Column(f"sequence_accuracy_{last}", f"whole rows at {last}"),
        ]

    def finish(self, options: StateTrackingOptions, rows: list[Row]) -> list[Row]:
        """See `Study`: the label "found" is the length up to which a share `SOLVED` of the answers is right."""

        def found(row: Row) -> str:
            means = {length: row.spread(f"accuracy_{length}").mean for length in sorted(options.task.test_lengths)}
            solved = list(itertools.takewhile(lambda length: (means[length] or 0) >= SOLVED, means))
            return "no" if not solved else "yes" if len(solved) == len(means) else f"to {solved[-1]}"

        return [dataclasses.replace(row, labels=row.labels | {"found": found(row)}) for row in rows]

    def notes(self, options: StateTrackingOptions) -> str:
        """See `Study`."""
        task = options.task
        return (
            f"trained on rows of {task.length}, {task.steps} steps of {task.batch_size} at most, AdamW with decay "
            f"{task.optimizer.weight_decay:g} and beta2 {task.optimizer.beta2:g} (DeltaProduct: 2,048, 1e-6, 0.999); "
            f"theory is of depth {options.depth} at any length; found is where {SOLVED:g} of the answers are right"
        )

    def draw(self, options: StateTrackingOptions, rows: list[Row], file: Path, note: str) -> None:
        """See `Study`: accuracy against length, a panel per group, a line per rule, solid where theory says yes."""
        from matplotlib import colormaps

        colors, lengths = colormaps["tab20"].colors, sorted(set(options.task.test_lengths))
        groups, rules = ([*dict.fromkeys(row.labels[name] for row in rows)] for name in ("group", "rule"))
        styles = {"yes": "-", "open": "--", "no": ":"}
        with plots.panels(file, len(groups), 4 + 4 * min(len(groups), 4), 4.5 * -(-len(groups) // 4), note=note) as all:
            for axes, name in zip(all, groups, strict=True):
                for row in (row for row in rows if row.labels["group"] == name):
                    draw_spreads(
                        axes, {length: row.spread(f"accuracy_{length}") for length in lengths},
                        color=colors[rules.index(row.labels["rule"]) % 20], linestyle=styles[row.labels["theory"]],
                        label=row.labels["rule"],
                    )  # fmt: skip
                axes.axhline(1 / group(name).order, color="gray", linewidth=0.8)
                axes.axvline(options.task.length, color="gray", linewidth=0.8)
                axes.set_xscale("log", base=2)
                axes.set(title=name, xlabel="length (vertical: trained on)", ylim=(0, 1.03))
            all[0].set_ylabel("right answers; theory: solid yes, dashed open, dotted no")
            handles, names = all[0].get_legend_handles_labels()
            all[0].figure.legend(handles, names, loc="outside right upper", fontsize="small")
