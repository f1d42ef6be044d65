"""The tables of `titans models`: every memory rule by name, its parts, its paper, the forms that run it, and ways to
keep it; then the blocks that hold memories."""

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Collection
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from titans_jax.config import ConfigError, MemoryConfig, cache_aggregation, check_levels
from titans_jax.memory import FORMS, choose_form
from titans_jax.memory.caching import AGGREGATIONS
from titans_jax.memory.rule.presets import PRESETS, Preset, state_floats
from titans_jax.models.block import BLOCKS
from titans_jax.ops.backend import TPU

HEAD_DIM = 64
"""The width of a head whose floats are counted."""


def print_rules() -> None:
    """Print the tables."""
    # 80 columns hold the five with nothing to spare but a line between them.
    names = Column("preset", min_width=max(map(len, PRESETS)))
    table = Table(names, "memory", "bias", "retention", "algorithm", box=box.MINIMAL, padding=0, show_edge=False)
    table.show_lines, forms = True, {}
    for name, preset in PRESETS.items():
        rule, gates = preset.make(), preset.gates
        forms.setdefault(choose_form("auto", rule, gates.example(rule), TPU), []).append(name)
        retention = [_gate(gates.retention)] * (gates.retention != "keep")
        retention += ["with its keys"] * gates.rotated_keys
        retention += [f"{side} channels" for side in ("key", "value") if getattr(gates, side)]
        table.add_row(
            "\n".join([name, *_paper(preset), f"{state_floats(rule, HEAD_DIM):,} floats" + ", exact" * rule.exact]),
            "\n".join(_words(rule.architecture)),
            "\n".join(_words(rule.bias)),
            "\n".join([*_words(rule.retention), *retention]) if retention else "none",
            "\n".join(_words(rule.algorithm)),
        )
    console = Console()
    console.print(table)
    on_tpu = "; ".join(f"{form} for {_names(names, PRESETS)}" for form, names in forms.items())
    everywhere = ", ".join(form for form in FORMS if form != "fused")
    notes = (
        f"floats: size of the memory of one head of width {HEAD_DIM}",
        "exact: all forms give the token-by-token rule; other rules are defined by chunks (model.memory.chunk_size)",
        "retention: its gates stand below it, one per fast matrix or one per channel",
        f"model.memory.form: every rule runs as {everywhere}; auto on a TPU is {on_tpu}",
        f"Memory Caching, arXiv 2602.24281 (model.memory.caching {', '.join(AGGREGATIONS)}; "
        f"model.memory.cache_segmentation): {_able(cache_aggregation, caching='average')}",
        "TNT, arXiv 2511.07343 (model.memory.local_chunks, model.memory.shard): all that are defined by chunks",
        "log-linear attention, arXiv 2506.04761 (model.memory.log_linear_levels): "
        f"{_able(check_levels, log_linear_levels=1)}",
    )
    console.print("", *notes, "", sep="\n")
    blocks = Table("block (model.pattern)", "what it does", box=box.MINIMAL, padding=0, show_edge=False)
    for name, block in BLOCKS.items():
        blocks.add_row(name, Text((inspect.getdoc(block) or "").split("\n\n")[0]))  # [P | x] is no markup
    console.print(blocks)


def _paper(preset: Preset) -> list[str]:
    """The paper that a preset's docstring cites first, if it cites one."""
    return re.findall(r"arXiv [0-9.]+[0-9]", inspect.getdoc(preset.make) or "")[:1]


def _words(choice: Any) -> list[str]:
    """A choice of a rule in words: its name, and its fields that are not at their defaults."""
    words = [re.sub("(?<=[a-z])(?=[A-Z])", " ", type(choice).__name__).lower()]
    for f in dataclasses.fields(choice):
        value = getattr(choice, f.name)
        if value != f.default:
            words.append((f.name if value is True else f"{f.name} {value}").replace("_", " "))
    return words


def _gate(gate: Any) -> str:
    """The word for a gate: its name, or "its own gate" for one that a preset defines itself."""
    return gate if isinstance(gate, str) else "its own gate"


def _able(check: Callable[[MemoryConfig], object], **fields: Any) -> str:
    """The names of the presets that a check does not refuse with these fields of the memory."""
    able = []
    for name in PRESETS:
        with contextlib.suppress(ConfigError):
            check(MemoryConfig(preset=name, **fields))
            able.append(name)
    return _names(able, PRESETS)


def _names(some: list[str], every: Collection[str]) -> str:
    """These names, or "all but" the others where those are fewer."""
    others = [name for name in every if name not in some]
    if len(some) <= len(others):
        return ", ".join(some)
    return f"all but {', '.join(others)}" if others else "all"
