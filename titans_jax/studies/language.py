"""`titans study language`: the papers' main table in miniature, on real text.

It trains every model of Titans' table 1 and Miras' table 2 that the library has, each with as many parameters as the
largest of them, on the same number of tokens of the same text: books, WikiText-2 or the source of Python's standard
library. The table has bits per byte of held-out text; word perplexity, which is 2 to the mean number of bits per word
(words are separated by blanks) and does not depend on the tokenizer; and the gain from the memory. The papers' models
have 340 million parameters and 15 billion tokens, and their WikiText is the raw test text, which `titans evaluate RUN
wikitext` reads: only the order of models can be compared.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from titans_jax import plots
from titans_jax.config import ConfigError, DataConfig, MemoryConfig, did_you_mean
from titans_jax.data.sets import file_or_place
from titans_jax.memory.rule.presets import PRESETS
from titans_jax.studies import models
from titans_jax.studies.models import ATTENTION, MAMBA, SAMBA, WITHOUT_MEMORY
from titans_jax.studies.study import Cell, Column, Study, StudyOptions, at_least_one, register_study, with_seeds
from titans_jax.studies.table import Row
from titans_jax.studies.tasks import Language

MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Transformer++": (ATTENTION, ("attention",)),
    "RetNet": ("retnet", ("lmm",)),
    "HGRN2": ("hgrn2", ("lmm",)),
    "GLA": ("gla", ("lmm",)),
    "Mamba": (MAMBA, WITHOUT_MEMORY[MAMBA]),
    "Mamba2": ("mamba2", ("lmm",)),
    "DeltaNet": ("deltanet", ("lmm",)),
    "TTT-Linear": ("ttt_linear", ("lmm",)),
    "TTT-MLP": ("ttt_mlp", ("lmm",)),
    "Gated DeltaNet": ("gated_deltanet", ("lmm",)),
    "Moneta": ("moneta", ("lmm",)),
    "Yaad": ("yaad", ("lmm",)),
    "Memora": ("memora", ("lmm",)),
    "Titans LMM": ("titans", ("lmm",)),
    "Samba*": (SAMBA, WITHOUT_MEMORY[SAMBA]),
    "Gated DeltaNet-H2*": ("gated_deltanet", ("lmm", "window")),
    "Moneta-H*": ("moneta", ("lmm", "window")),
    "Yaad-H*": ("yaad", ("lmm", "window")),
    "Memora-H*": ("memora", ("lmm", "window")),
    "Titans MAC*": ("titans", ("mac",)),
    "Titans MAG*": ("titans", ("mag",)),
    "Titans MAL*": ("titans", ("mal",)),
}
"""Preset and pattern of blocks by the name of a row; * has attention in addition to the memory."""

LATER = {
    "LaCT*": ("lact", ("mag",)),
    "Hope": ("hope", ("hope",)),
    "Hope-Attention*": ("hope", ("hope_attention",)),
}
"""The same of later papers' models whose block is not lmm."""


def known_models() -> dict[str, tuple[str, tuple[str, ...]]]:
    """All rows by name: `MODELS`, `LATER`, and every other preset, one's own among them, as an LMM."""
    return {preset: (preset, ("lmm",)) for preset in PRESETS} | MODELS | LATER


WIKITEXT, NOVELS = ("wikitext-2/wiki.train.tokens", "wikitext-2/wiki.valid.tokens"), "books/valid.jsonl"
"""Paths below the folder of data: text to train on and to validate on, and the novels of books/ that are held out."""


def texts(folder: str, tokenizer: str, length: int) -> dict[str, DataConfig]:
    """The texts by name: files below a folder of data, which may be compressed, and how they are cut into rows."""
    cut = {"tokenizer": tokenizer, "packing": "stream", "sequence_length": length}
    train, valid, novels = (file_or_place(folder, file) for file in (*WIKITEXT, NOVELS))
    return {
        "books": DataConfig(source="jsonl", path=str(Path(folder) / "books"), validation_path=novels, **cut),
        "wikitext": DataConfig(source="text", path=train, validation_path=valid, **cut),
        "python": DataConfig(**cut),
    }


@dataclass(frozen=True)
class LanguageOptions(StudyOptions):
    """Train every model of the papers' main tables on the same tokens of real text."""

    models: tuple[str, ...] = tuple(MODELS)
    """Rows by name; LaCT*, Hope, Hope-Attention*, and presets as LMMs, such as those of later models, are names too."""
    texts: tuple[str, ...] = ("books", "wikitext", "python")
    """Texts: books, wikitext, python."""
    folder: str = "data"
    """The folder with books/ and wikitext-2/, as `titans data fetch` lays them out; the text python needs no folder."""
    tokenizer: str = "byte"
    """`byte`, or the path of a SentencePiece model."""
    head_dim: int = 64
    """Width of a head."""
    dim: int = 512
    """Width of the residual stream."""
    depth: int = 8
    """Blocks."""
    segment: int = 256
    """Segment of mac, and window of all attention that has one."""
    sequence_length: int = 2048
    """Tokens of a row."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(expansion=2))
    """The other fields of the memories."""
    steps: int = 4000
    """Training steps."""
    batch_size: int = 32
    """Rows of a step."""
    learning_rate: float = 1e-3
    """Peak of the cosine schedule."""
    evaluation_batches: int = 32
    """Held-out batches read."""


@register_study("language")
class LanguageStudy(Study):
    """Every model of the papers at equal parameters and tokens: bits per byte and word perplexity of real text."""

    options = LanguageOptions

    def defaults(self, said: LanguageOptions) -> LanguageOptions:
        """See `Study`."""
        default = LanguageOptions(quick=said.quick)
        if not said.quick:
            return default
        few = ("Transformer++", "Gated DeltaNet", "Moneta", "Yaad", "Titans LMM", "Titans MAC*", "Titans MAL*")
        return dataclasses.replace(
            default, seeds=1, models=few, texts=("python",), dim=64, head_dim=16, depth=2, segment=64,
            sequence_length=256, steps=150, batch_size=4, learning_rate=3e-3, evaluation_batches=32,
        )  # fmt: skip

    def cells(self, options: LanguageOptions) -> list[Cell]:
        """See `Study`."""
        at_least_one(options, "models", "texts", "head_dim", "dim", "depth", "segment", "sequence_length")
        for chosen, known in (
            ("models", rows := known_models()),
            ("texts", every := texts(options.folder, options.tokenizer, options.sequence_length)),
        ):
            for name in getattr(options, chosen):
                if name not in known:
                    hint = did_you_mean(name, known) or f"; use {', '.join(known)}"
                    raise ConfigError(f"{chosen} has {name!r}{hint}")
        cells: list[Cell] = []
        sizes = options.dim, options.depth, options.head_dim
        for text in dict.fromkeys(options.texts):
            task = Language(
                steps=options.steps, batch_size=options.batch_size, learning_rate=options.learning_rate,
                data=every[text], evaluation_batches=options.evaluation_batches, positions=0,
            )  # fmt: skip
            kinds = []
            for name in dict.fromkeys(options.models):
                preset, pattern = rows[name]
                model = models.small_model(preset, pattern[0], *sizes, options.memory, segment=options.segment)
                model = dataclasses.replace(model, pattern=pattern)
                kinds.append(({"text": text, "model": name}, model))
            cells += with_seeds(options, kinds, task)
        return cells

    def columns(self, options: LanguageOptions) -> list[Column]:
        """See `Study`."""
        return [
            Column("bits_per_byte", "bits per byte"), Column("word_perplexity", "word perplexity", 1),
            Column("memory_gain", "memory gain"),
        ]  # fmt: skip

    def notes(self, options: LanguageOptions) -> str:
        """See `Study`."""
        wikitext = "wikitext is tokenised text with <unk>, not the papers' raw test; " * ("wikitext" in options.texts)
        return (
            f"rows of {options.sequence_length:,} tokens, {options.steps:,} steps of {options.batch_size}; "
            f"* has attention too; {wikitext}"
            "memory gain: bits per byte lost where nothing is written"
        )

    def draw(self, options: LanguageOptions, rows: list[Row], file: Path, note: str) -> None:
        """See `Study`: bars of bits per byte, a panel per text, models with attention in another colour."""
        every = list(dict.fromkeys(row.labels["text"] for row in rows))
        height = 1.5 + 0.25 * len(options.models)
        with plots.panels(file, len(every), 3 + 3.5 * len(every), height, note=note) as panels:
            for (number, text), axes in zip(enumerate(every), panels, strict=True):
                own = [row for row in rows if row.labels["text"] == text]
                names = [row.labels["model"] for row in own]
                known = [(place, row.spread("bits_per_byte")) for place, row in enumerate(own)]
                known = [(place, value) for place, value in known if value.count]
                axes.barh(
                    [place for place, _ in known], [value.mean for _, value in known],
                    xerr=[value.sd or 0 for _, value in known], capsize=2,
                    color=["tab:orange" if _attends(names[place]) else "tab:blue" for place, _ in known],
                )  # fmt: skip
                axes.set_yticks(range(len(own)), names if number == 0 else [""] * len(own))
                axes.invert_yaxis()
                least = min((value.mean for _, value in known), default=0)
                axes.set(title=text, xlabel="bits per byte (orange: with attention)")
                axes.set_xlim(left=0.9 * least)


def _attends(name: str) -> bool:
    return name.endswith("*") or known_models()[name][0] == ATTENTION
