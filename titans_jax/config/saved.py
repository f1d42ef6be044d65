"""Configurations that earlier versions saved: what a field that they lack, or an old None, meant then."""

import functools
from collections.abc import Mapping
from typing import Any

from titans_jax.config.memory_config import MemoryConfig
from titans_jax.config.rules import gate_choices, memory_rule
from titans_jax.config.schema import Config, ConfigError, ModelConfig, from_dict, replaced, to_dict

BEFORE: Mapping[str, Any] = {
    "model.mac_write": "attention",
    "model.merge": "product",
    "model.memory.bound_slope": False,
    "model.memory.cache_counted": False,
    "model.memory.forget": "preset",
    "model.memory.forget_to": "zero",
    "model.memory.key_start": "random",
    "model.memory.normalize_values": False,
    "model.memory.orthogonal_start": False,
    "model.memory.prediction_gate": False,
    "model.memory.scale_keys": False,
    "model.memory.share_steps": False,
    "model.memory.skip_projection": False,
    "model.memory.step_unit": "head_dim",
    "model.memory.tie_keys": False,
    "model.memory.value_skip": False,
}
"""How models behaved before these fields existed: the value of a field that a saved configuration lacks."""

DEFAULTS = 6
"""Saved with a configuration: which defaults its None stands for, and where fresh gates start. 1, which was not
written: memories whose weights are made of logits, such as Memora, have values as projected. Up to 2: Memora's logits
start with a deviation of 1; no memory starts with steps of a third of the largest, and Huber thresholds start at 1,
but a model that was saved has its own gates. Up to 3: the blocks of Hope start with far larger continuum memories
and steps, and with keys at random. Up to 4: Moneta's cotangent grows as a power of the error, however large that is, as
it does where its bias is named. Up to 5: no memory starts with steps of a sixth of the largest; those with momentum
start with an eighth."""
EARLIER_DEVIATION = "start_deviation=1.0"
"""The argument of `retention` that says where Memora's logits started up to 2."""


def to_saved(config: Config) -> dict[str, Any]:
    """The configuration for a file, which `from_saved` of this and of later versions understands."""
    return to_dict(config) | {"defaults": DEFAULTS}


def from_saved(values: dict[str, Any]) -> Config:
    """The configuration that `to_saved` of this or an earlier version made; raises as `from_dict`, and ConfigError for
    one of a later version."""
    values = dict(values)
    defaults = values.pop("defaults", 1)
    if defaults not in range(1, DEFAULTS + 1):
        raise ConfigError(f"defaults is {defaults!r}, and this version knows 1 to {DEFAULTS}; use a later version")
    config = from_dict(values)
    for name, value in BEFORE.items():
        *path, field = name.split(".")
        if not _holds(values, path, field):
            config = replaced(config, path, field, value)
    memory = config.model.memory
    if defaults == 1 and _of_logits(memory) and not memory.normalize_values:
        config = replaced(config, ["model", "memory"], "normalize_values", False)
        # Until `attention_conv` came, such memories had no skip for values as projected.
        if memory.value_skip is None and not _holds(values, ["model"], "attention_conv"):
            config = replaced(config, ["model", "memory"], "value_skip", False)
    said = memory.retention or ("kullback_leibler" if memory.preset == "memora" else "")
    name, _, arguments = said.rstrip(")").partition("(")
    if defaults <= 2 and name in ("kullback_leibler", "lagged_kullback_leibler"):
        said = f"{name}({arguments}{', ' if arguments else ''}{EARLIER_DEVIATION})"
        config = replaced(config, ["model", "memory"], "retention", said)
    if defaults <= 4 and memory.preset == "moneta" and memory.bias is None and memory.bound_slope:
        config = replaced(config, ["model", "memory"], "bias", "lp")
    return config


def earlier_retentions(config: MemoryConfig) -> set[str | None]:
    """What `retention` may have been in earlier versions, which did not say where logits start; empty where it is what
    it was."""
    said, end = config.retention or "", f"{EARLIER_DEVIATION})"
    if not said.endswith(end):
        return set()
    before = said.removesuffix(end).removesuffix(", ")
    before = before.removesuffix("(") if before.endswith("(") else f"{before})"
    return {before, None} if (config.preset, before) == ("memora", "kullback_leibler") else {before}


def starts_differ(config: ModelConfig, defaults: int) -> bool:
    """Whether a fresh model starts elsewhere than when `defaults` were today's."""
    blocks = {"hope", "hope_attention"}
    if defaults <= 3 and (config.memory.preset == "hope" or not blocks.isdisjoint(config.pattern)):
        return True
    choices = gate_choices(config.memory)
    if defaults <= 2 and (choices.step_size == "bounded_third" or choices.by_channel(memory_rule(config.memory))):
        return True
    return defaults <= 5 and choices.step_size == "bounded_sixth"


def _of_logits(config: MemoryConfig) -> bool:
    """Whether fast weights are made of logits, as Memora's are; False for parts that are not registered."""
    try:
        return memory_rule(config).retention.positive
    except ConfigError:  # said by name where the configuration is used
        return False


def _holds(values: dict[str, Any], path: list[str], field: str) -> bool:
    return field in functools.reduce(lambda tree, part: tree.get(part, {}), path, values)
