"""`titans study length`: the loss of models trained on short rows far beyond that length, with the state carried or
emptied; `titans study lengths`: a model for each length of training rows (figure 7 of Titans), also read beyond it.

The long texts are stretches of the held-out text, across documents. With a memory that is worth carrying, the loss does
not rise with the position (the last bucket over the best one is near 1), and is below the loss with the state emptied
before every row.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titans_jax import plots
from titans_jax.config import ConfigError, MemoryConfig
from titans_jax.studies import models
from titans_jax.studies.models import WINDOW, WITHOUT_MEMORY
from titans_jax.studies.study import Cell, Column, Study, StudyOptions, at_least_one, register_study, with_seeds
from titans_jax.studies.table import Row
from titans_jax.studies.tasks import Language

POSITION_COLUMNS = [
    Column("bits_per_byte", "bits per byte"), Column("memory_gain", "memory gain"),
    Column("last_over_best", "last over best"), Column("last_over_fresh", "last over emptied"),
]  # fmt: skip
"""What a table says of models that were read far beyond their rows; see `titans_jax.studies.tasks.Language`."""


@dataclass(frozen=True)
class LengthOptions(StudyOptions):
    """Train small models on short rows of text, and measure their loss by position in long ones."""

    blocks: tuple[str, ...] = ("lmm", "mac", "mag", "mal")
    """Blocks that hold the memories."""
    presets: tuple[str, ...] = ("titans", "moneta", "yaad", "memora", "ttt_mlp", "ttt_linear")
    """Memories, each in every block."""
    reference: tuple[str, ...] = ("gated_deltanet", WINDOW)
    """Models to compare with: memories, in the block lmm only, and without a memory, "window", "attention",
    "window_conv" and "attention_conv" (with convolutions in the attention), "mamba" and "samba"."""
    head_dim: int = 32
    """Width of a head."""
    dim: int = 128
    """Width of the residual stream."""
    depth: int = 2
    """Blocks."""
    hidden_dim: int | None = None
    """Width of the feed-forward layers, before models are made equally large; None: 8/3 of dim."""
    embedding_scale: float = 1.0
    """What the vectors of tokens are multiplied by; deep models may need more (`ModelConfig.embedding_scale`)."""
    segment: int = 64
    """Segment of mac, and window of mag, mal and "window"."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(depth=2, expansion=2))
    """The other fields of the memories."""
    rows: tuple[int, ...] = ()
    """Lengths of training rows, in tokens: models are trained for each length, with equal numbers of tokens per step.
    Empty: only language.data.sequence_length."""
    language: Language = field(default_factory=Language)
    """Settings of the text."""


@register_study("length")
class LengthStudy(Study):
    """Loss by position far beyond the training length, with the state carried and emptied."""

    options = LengthOptions

    def defaults(self, said: LengthOptions) -> LengthOptions:
        """See `Study`."""
        default = LengthOptions(quick=said.quick)
        if not said.quick:
            return default
        text = Language(steps=100, batch_size=4, evaluation_batches=8, positions=8192, positions_rows=2)
        return dataclasses.replace(default, seeds=1, dim=64, head_dim=16, presets=("titans",), language=text)

    def cells(self, options: LengthOptions) -> list[Cell]:
        """See `Study`."""
        at_least_one(options, "blocks", "head_dim", "dim", "depth", "hidden_dim", "segment")
        if not options.embedding_scale > 0:
            raise ConfigError(f"embedding_scale is {options.embedding_scale}; use a number above 0")
        if not options.presets + options.reference:
            raise ConfigError("presets and reference are empty; name at least one memory")
        if options.language.positions == 0:
            raise ConfigError("language.positions is 0; use a multiple of language.data.sequence_length, such as 32768")
        models.check_presets(options.presets)
        models.check_presets(options.reference, others=WITHOUT_MEMORY)
        models.check_blocks(options.blocks)
        references = models.in_blocks(("lmm",), options.reference)
        said = {name: getattr(options, name) for name in ("hidden_dim", "embedding_scale")}
        sizes = options.dim, options.depth, options.head_dim
        built = {}
        for block, preset in dict.fromkeys((*itertools.product(options.blocks, options.presets), *references)):
            model = models.small_model(preset, block, *sizes, options.memory, segment=options.segment)
            built[block, preset] = dataclasses.replace(model, **said)
        cells: list[Cell] = []
        for language in languages(options):
            kinds = [
                ({"block": block, "preset": preset, "rows": language.sequence_length}, model)
                for (block, preset), model in built.items()
            ]
            cells += with_seeds(options, kinds, language)
        return cells

    def columns(self, options: LengthOptions) -> list[Column]:
        """See `Study`."""
        return POSITION_COLUMNS

    def notes(self, options: LengthOptions) -> str:
        """See `Study`."""
        rows = " or ".join(f"{language.sequence_length:,}" for language in languages(options))
        last = options.language.positions
        return (
            "memory gain: bits per byte lost where nothing is written; "
            f"trained on rows of {rows}, read to {last:,} in stretches of the held-out text, across documents: the "
            "carried loss of the last bucket of positions over that of the best, and over the loss with the state "
            "emptied every row"
        )

    def draw(self, options: LengthOptions, rows: list[Row], file: Path, note: str) -> None:
        """See `Study`: loss by position, a panel per block with a memory, carried as lines and emptied dashed; models
        without a memory are in every panel."""
        from matplotlib import colormaps

        colors = colormaps["tab10"].colors
        plain = [row for row in rows if row.labels["preset"] in WITHOUT_MEMORY]
        blocks = list(dict.fromkeys(row.labels["block"] for row in rows if row not in plain)) or [""]
        names = list(dict.fromkeys(line_name(options, row) for row in rows))
        across = min(len(blocks), 4)
        with plots.panels(file, len(blocks), 3 + 3.5 * across, 4.5 * -(-len(blocks) // 4), note=note) as panels:
            for axes, block in zip(panels, blocks, strict=True):
                for row in [row for row in rows if row.labels["block"] == block and row not in plain] + plain:
                    name = line_name(options, row)
                    draw_positions(axes, row, name, colors[names.index(name) % 10])
                axes.set(title=block)
                axes.legend(fontsize="x-small")
            panels[0].set_ylabel("loss, nats per token; dashed: state emptied")


@register_study("lengths")
class LengthsStudy(LengthStudy):
    """A model for each length of training rows, also read beyond it (Titans' figure 7)."""

    def defaults(self, said: LengthOptions) -> LengthOptions:
        """See `Study`."""
        default = super().defaults(said)
        kinds = {"blocks": ("lmm",), "presets": ("titans", "mamba2"), "reference": ()}
        if said.quick:
            return dataclasses.replace(default, rows=(128, 512, 2048), **kinds)
        language = Language(steps=3000, batch_size=64, positions=65536)
        return dataclasses.replace(
            default, rows=(2048, 4096, 8192, 16384, 32768), dim=256, depth=4, language=language, **kinds
        )


def draw_positions(axes: Any, row: Row, name: str, color: Any) -> None:
    """Loss by position of a row of a table, where it has been measured: carried as a line, emptied dashed."""
    axes.set_xscale("log", base=2)
    axes.set_xlabel("position (end of the bucket)")
    if not row.curve("carried"):
        return
    ends = [value.mean for value in row.curve("ends")]
    carried, fresh = (
        [math.nan if value.mean is None else value.mean for value in row.curve(which)] for which in ("carried", "fresh")
    )
    sds = [value.sd or 0 for value in row.curve("carried")]
    axes.errorbar(ends, carried, sds, color=color, marker="o", markersize=4, capsize=3, label=name)
    axes.plot(ends, fresh, color=color, linestyle="--", linewidth=1)


def line_name(options: LengthOptions, row: Row) -> str:
    """The name of a row in the figure: the memory, and the length of its training rows where there are several."""
    rows = f" on {row.labels['rows']:,}" if len(set(options.rows)) > 1 else ""
    return f"{row.labels['preset']}{rows}"


def languages(options: LengthOptions) -> list[Language]:
    """The text, cut into rows of each length, with equal numbers of tokens per step.

    Raises:
      ConfigError: a length does not divide the tokens of a step, or there are none.
    """
    language, found = options.language, []
    if language.sequence_length < 1:
        raise ConfigError(f"language.data.sequence_length is {language.sequence_length}; use at least 1")
    if language.batch_size < 1:
        raise ConfigError(f"language.batch_size is {language.batch_size}; use at least 1")
    for length in dict.fromkeys(options.rows or (language.sequence_length,)):
        tokens = language.batch_size * language.sequence_length
        if length < 1 or tokens % length:
            raise ConfigError(
                f"rows has {length}; use divisors of {tokens:,}, the tokens of language.batch_size rows of "
                f"{language.sequence_length}"
            )
        cut = dataclasses.replace(language.data, sequence_length=length)
        same = bool(options.rows)  # bits per byte of rows of different lengths are compared
        found.append(dataclasses.replace(language, data=cut, batch_size=tokens // length, same_text=same))
    return found
