"""Configurations that earlier versions saved: what a field that they lack, or an old None, meant then."""

import functools
from collections.abc import Mapping
from typing import Any

from titans_jax.config.memory_config import MemoryConfig
from titans_jax.config.rules import memory_rule, sizes_values
from titans_jax.config.schema import Config, ConfigError, from_dict, replaced

BEFORE: Mapping[str, Any] = {
    "model.mac_write": "attention",
    "model.merge": "product",
    "model.memory.bound_slope": False,
    "model.memory.cache_counted": False,
    "model.memory.forget": "preset",
    "model.memory.forget_to": "zero",
    "model.memory.key_start": "random",
    "model.memory.normalize_values": False,
    "model.memory.prediction_gate": False,
    "model.memory.share_steps": False,
    "model.memory.skip_projection": False,
    "model.memory.step_unit": "head_dim",
    "model.memory.tie_keys": False,
    "model.memory.value_skip": False,
}
"""How models behaved before these fields existed: the value of a field that a saved configuration lacks."""


def from_saved(values: dict[str, Any]) -> Config:
    """The configuration that `to_dict` of this or an earlier version saved; raises as `from_dict`."""
    config = from_dict(values)
    for name, value in BEFORE.items():
        *path, field = name.split(".")
        if not _holds(values, path, field):
            config = replaced(config, path, field, value)
    # Until `attention_conv` came, memories whose weights are made of logits had no skip for values as projected.
    memory = config.model.memory
    if not _holds(values, ["model"], "attention_conv") and memory.value_skip is None and _had_no_skip(memory):
        config = replaced(config, ["model", "memory"], "value_skip", False)
    return config


def _had_no_skip(config: MemoryConfig) -> bool:
    """Whether fast weights are positive, as Memora's are, and values as projected; False for parts that are not
    registered."""
    try:
        return memory_rule(config).retention.positive and not sizes_values(config)
    except ConfigError:  # said by name where the configuration is used
        return False


def _holds(values: dict[str, Any], path: list[str], field: str) -> bool:
    return field in functools.reduce(lambda tree, part: tree.get(part, {}), path, values)
