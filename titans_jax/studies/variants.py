"""`titans study depth`, `pq` and `yaad`: one memory with one of its choices changed, on text far beyond its rows.

depth: the number of fast matrices of Titans' memory, 1 to 4 (Titans, figure 7). pq: Moneta's exponents, p varied at the
default q and q at the default p (Miras 5.3). yaad: Yaad without each of its parts (Miras' ablation, five removals). All
models have the same number of parameters and are trained on the same number of tokens of the same text; the table has
their loss over the first 2K, 4K, ... tokens of long stretches of the held-out text, across documents, with the state
carried on from row to row. The papers' figures are for other tokens, sizes and lengths: only the order of models can be
compared, not their numbers.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titans_jax import plots
from titans_jax.config import MemoryConfig
from titans_jax.studies import models
from titans_jax.studies.study import Cell, Column, Study, StudyOptions, at_least_one, register_study, with_seeds
from titans_jax.studies.table import Row, draw_spreads
from titans_jax.studies.tasks import Language

Variants = list[tuple[dict[str, Any], dict[str, Any]]]
"""Labels of a row of the table, and the fields of the memory that it sets."""

LENGTHS_SHOWN = 5
"""At how many lengths a table shows the loss; each length is twice the one before."""

YAAD: dict[str, dict[str, Any]] = {
    "full": {},
    "without retention": {"forget": "never", "channel_steps": "both"},
    "constant threshold": {"bias": "huber(delta=5.0, constant=True)"},
    "without L2": {"bias": "value_less"},
    "without L1": {"bias": "l2"},
    "linear memory": {"architecture": "linear"},
}
"""Yaad, and Yaad without each of its parts: its forgetting (its step sizes by channel stay), the threshold that depends
on the token (for one that stays where it starts), the quadratic and the linear branch of its bias, and its depth."""


@dataclass(frozen=True)
class VariantOptions(StudyOptions):
    """Train small models that differ only in their memory, and read texts far longer than their training rows."""

    block: str = "lmm"
    """The block that holds the memory."""
    head_dim: int = 32
    """Width of a head."""
    dim: int = 256
    """Width of the residual stream."""
    depth: int = 4
    """Blocks."""
    segment: int = 64
    """Segment of mac, and window of mag and mal."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(expansion=2))
    """The other fields of the memories."""
    language: Language = field(default_factory=lambda: Language(steps=3000, batch_size=32))
    """Settings of the text."""


class VariantStudy(Study):
    """One memory with one choice changed at a time; a subclass defines the rows."""

    options = VariantOptions

    def variants(self) -> Variants:
        """The rows; the fields of each include the preset."""
        raise NotImplementedError

    def defaults(self, said: VariantOptions) -> VariantOptions:
        """See `Study`."""
        default = self.options(quick=said.quick)
        if not said.quick:
            return default
        text = Language(steps=80, batch_size=4, evaluation_batches=8, positions=8192, positions_rows=2)
        return dataclasses.replace(default, seeds=1, dim=64, depth=2, head_dim=16, language=text)

    def cells(self, options: VariantOptions) -> list[Cell]:
        """See `Study`."""
        at_least_one(options, "head_dim", "dim", "depth", "segment")
        models.check_blocks([options.block])
        kinds = []
        sizes = options.dim, options.depth, options.head_dim
        for label, fields in self.variants():
            models.check_unnamed(options.memory, fields["preset"])
            memory = dataclasses.replace(options.memory, **fields)
            model = models.small_model(memory.preset, options.block, *sizes, memory, segment=options.segment)
            kinds.append((label, model))
        return [*with_seeds(options, kinds, options.language)]

    def lengths(self, options: VariantOptions) -> list[int]:
        """The lengths at which the table shows the loss."""
        language = options.language
        halves = [language.positions >> shift for shift in range(LENGTHS_SHOWN)] if language.positions else []
        return [length for length in reversed(halves) if length >= language.sequence_length]

    def columns(self, options: VariantOptions) -> list[Column]:
        """See `Study`."""
        far = [Column(f"to_{length}", f"nats to {length:,}") for length in self.lengths(options)]
        return [Column("bits_per_byte", "bits per byte"), Column("memory_gain", "memory gain"), *far]

    def finish(self, options: VariantOptions, rows: list[Row]) -> list[Row]:
        """See `Study`: the mean loss over the first tokens of long texts, computed from the buckets of positions."""
        for row in rows:
            seeds = list(zip(row.numbers.get("ends", []), row.numbers.get("carried", []), strict=True))
            for length in self.lengths(options):
                row.numbers[f"to_{length}"] = [mean_to(length, *seed) for seed in seeds]
        return rows

    def notes(self, options: VariantOptions) -> str:
        """See `Study`."""
        language = options.language
        return (
            f"trained on rows of {language.sequence_length:,}, {language.steps:,} steps of {language.batch_size}; nats "
            f"per token over the first tokens of {language.positions_rows} stretches of the held-out text, across "
            "documents, state carried on"
        )

    def draw(self, options: VariantOptions, rows: list[Row], file: Path, note: str) -> None:
        """See `Study`: the loss against the length that is read."""
        lengths = self.lengths(options)
        with plots.figure(file, 6.5, 4.5, note=note) as axes:
            for number, row in enumerate(rows):
                draw_spreads(
                    axes, {length: row.spread(f"to_{length}") for length in lengths},
                    color=f"C{number % 10}", linestyle="-" if number < 10 else "--",
                    label=", ".join(f"{name} {value}" for name, value in row.labels.items()),
                )  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set(xlabel="tokens read", ylabel="mean loss, nats per token")
            axes.legend(fontsize="x-small")


def mean_to(length: int, ends: list[int] | None, means: list[float | None] | None) -> float | None:
    """Mean loss of the first `length` tokens, from the means of buckets that end at `ends`; None where one is not
    known."""
    if ends is None or means is None or length not in ends:
        return None
    used = ends.index(length) + 1
    if None in means[:used]:
        return None
    widths = [end - start for start, end in zip([0, *ends], ends[:used], strict=False)]
    return math.fsum(width * mean for width, mean in zip(widths, means, strict=False)) / length


@register_study("depth")
class DepthStudy(VariantStudy):
    """Titans' memory with 1 to 4 fast matrices, over lengths (its figure 7)."""

    def variants(self) -> Variants:
        """See `VariantStudy`."""
        return [({"memory depth": depth}, {"preset": "titans", "depth": depth}) for depth in (1, 2, 3, 4)]


@register_study("pq")
class PQStudy(VariantStudy):
    """Moneta with other exponents p of its bias and q of its retention (Miras 5.3)."""

    def variants(self) -> Variants:
        """See `VariantStudy`."""
        pairs = [*((p, 4.0) for p in (1.0, 1.5, 2.0, 2.8, 3.0, 3.2, 4.0)), *((3.0, q) for q in (2.0, 3.0, 4.0, 5.0))]
        return [({"p": p, "q": q}, {"preset": "moneta", "p": p, "q": q}) for p, q in dict.fromkeys(pairs)]


@register_study("yaad")
class YaadStudy(VariantStudy):
    """Yaad without each of its parts (Miras' ablation)."""

    def variants(self) -> Variants:
        """See `VariantStudy`."""
        return [({"variant": name}, {"preset": "yaad"} | fields) for name, fields in YAAD.items()]
