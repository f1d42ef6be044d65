"""Resuming a run: which fields may change, and the lines printed about those that did."""

from pathlib import Path
from typing import Literal, NamedTuple

from titans_jax.config import Config, ConfigError, leaves

TOKENIZERS = ("tokenizer.model", "tokenizer.json")
"""Names of a run folder's copy of its tokenizer: a SentencePiece model, or Hugging Face's file."""


def own_tokenizer(run_dir: Path) -> Path | None:
    """The run folder's copy of its tokenizer."""
    return next((run_dir / name for name in TOKENIZERS if (run_dir / name).is_file()), None)


class Rule(NamedTuple):
    """Whether a field, or the fields of a section, may change when a run is resumed."""

    fields: tuple[str, ...]
    """Names of fields, or beginnings of them that end with a dot."""
    change: Literal["refused", "said", "silent"]
    why: str


RULES = (
    Rule(("model.remat", "model.memory.form"), "said", "how the same numbers are computed"),
    Rule(("model.memory.key_start",), "said", "how keys began: they are long trained"),
    Rule(("model.",), "refused", "another model"),
    Rule(("data.path", "data.validation_path"), "silent", "the text itself is compared, wherever it is"),
    Rule(("data.tokenizer",), "silent", "the file itself is compared with the run's copy"),
    Rule(("data.",), "refused", "other batches"),
    Rule(("training.steps",), "said", "stretches the learning rate's decay; not fewer than were done"),
    Rule(("training.seed",), "said", "the text of samples only: the initial parameters are long trained"),
    Rule(
        ("training.run_dir", "training.resume_from", "training.accept_changed_data", "training.init_from"),
        "silent",
        "about this start",
    ),
    Rule(("training.checkpoint_commit",), "refused", "it tells which checkpoints are whole"),
    Rule(("optimizer.name",), "refused", "checkpoints hold this optimizer's moments"),
    Rule(("optimizer.ema",), "refused", "checkpoints hold the average or do not"),
    Rule(("optimizer.train_only",), "refused", "checkpoints hold the moments of what is trained"),
    Rule(("optimizer.", "training.", "extensions"), "said", "from the next step on"),
    Rule(("mesh.", "processes.", "profile."), "silent", "batches do not depend on them"),
)
"""The first rule that names a field or its section applies."""

WORDS = {"refused": "must stay", "said": "may change, and is said", "silent": "may change"}


def table() -> str:
    """The rules as a Markdown table, in their order."""
    lines = ["| fields | when a run goes on | because |", "|---|---|---|"]
    for rule in RULES:
        names = ", ".join(f"`{name}*`" if name.endswith(".") else f"`{name}`" for name in rule.fields)
        lines.append(f"| {names} | {WORDS[rule.change]} | {rule.why} |")
    return "\n".join(lines) + "\n"


def rule_of(name: str) -> Rule:
    """The rule for a field by its dotted name."""
    return next(
        rule for rule in RULES for each in rule.fields if name == each or each.endswith(".") and name.startswith(each)
    )


def check_same_run(saved: Config, config: Config, run_dir: Path) -> None:
    """Refuse to continue a run with another model, other batches or another tokenizer.

    Raises:
      ConfigError: names the first field that differs, with both values.
    """
    for name, before, now in _differences(saved, config):
        if rule_of(name).change == "refused":
            raise ConfigError(
                f"{name} is {now}, but the checkpoint in {run_dir} was trained with {before}; "
                f"use {before}, or another training.run_dir"
            )
    _check_same_tokenizer(saved.data.tokenizer, config.data.tokenizer, run_dir)


def changes(saved: Config, config: Config) -> list[str]:
    """Lines about the fields that have changed, to be printed: "optimizer.learning_rate is 0.001, was 0.003"."""
    return [
        f"{name} is {now}, was {before}"
        for name, before, now in _differences(saved, config)
        if rule_of(name).change == "said"
    ]


def differing(start: Config, config: Config) -> list[str]:
    """Lines, in the form of `changes`, for a run that begins with another run's weights: the fields of text, optimizer
    and model that differ from that run's."""
    sections = ("model.", "data.", "optimizer.", "training.z_loss", "training.gradient_accumulation")
    return [
        f"{name} is {now}, was {before}"
        for name, before, now in _differences(start, config)
        if name.startswith(sections)
    ]


def _differences(saved: Config, config: Config) -> list[tuple[str, object, object]]:
    """(name, value then, value now) of the fields that are not the same."""
    before = leaves(saved)
    return [(name, before[name], now) for name, now in leaves(config).items() if before[name] != now]


def _check_same_tokenizer(before: str, now: str, run_dir: Path) -> None:
    own = own_tokenizer(run_dir)
    if "byte" in (before, now):
        same, use = before == now, before
    elif own is not None:
        same, use = own.read_bytes() == Path(now).expanduser().read_bytes(), str(own)
    else:  # the run of a version that kept no copy
        same, use = Path(before).expanduser().absolute() == Path(now).expanduser().absolute(), before
    if not same:
        raise ConfigError(
            f"data.tokenizer is {now}, which is not the one that the checkpoint in {run_dir} was trained with; "
            f"use {use}, or another training.run_dir"
        )
