"""What a memory's configuration stands for: its rule and its gates, from the registries of `titans_jax.memory`.

jax is imported by the first call, so that a configuration is read, and help given, without it.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_jax.config.schema import ConfigError, MemoryConfig, ModelConfig
from titans_jax.registry import PACKAGE, did_you_mean

if TYPE_CHECKING:
    from titans_jax.memory.rule.gate_choices import GateChoices
    from titans_jax.memory.rule.presets import Preset
    from titans_jax.memory.rule.rule import MemoryRule

CONFIGURED = ("depth", "expansion", "chunk_size", "p", "q", "steps")
"""Fields that an argument of the same name of a preset, or of a part, is set by."""


def memory_rule(config: MemoryConfig) -> "MemoryRule":
    """The rule that a configuration describes: its preset's, with the choices it replaces.

    Raises:
      ConfigError: choices that cannot be, or that exclude each other.
    """
    try:
        return _memory_rule(config)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"model.memory: {str(error).rstrip('.')}") from error


def gate_choices(config: MemoryConfig) -> "GateChoices":
    """How the gates of the preset are made.

    Raises:
      ConfigError: there is no such preset.
    """
    from titans_jax.memory.rule.gate_choices import OPEN_BIAS

    gates, bias = _preset(config).gates, config.forget_bias
    if bias is None and memory_rule(config).forget_to_start:
        bias = OPEN_BIAS
    return gates if bias is None else dataclasses.replace(gates, forget_bias=bias)


def step_size_bound(model: ModelConfig) -> float:
    """The largest step size of a memory whose gate is bounded, as its gradients are multiplied by."""
    from titans_jax.memory.step_unit import error_removed

    memory = model.memory
    unit = model.head_dim if memory.step_unit == "head_dim" else error_removed(memory_rule(memory), model.head_dim)
    return memory.max_step_size / unit


def _memory_rule(config: MemoryConfig) -> "MemoryRule":
    from titans_jax.memory.rule import algorithms
    from titans_jax.memory.rule.architectures import ARCHITECTURES
    from titans_jax.memory.rule.biases import BIASES
    from titans_jax.memory.rule.retentions import RETENTIONS

    rule = _make(_preset(config).make, config)
    choices = {}
    for field, registry in (("architecture", ARCHITECTURES), ("bias", BIASES), ("retention", RETENTIONS)):
        name = getattr(config, field)
        if name is not None:
            choices[field] = _make(registered(registry, f"model.memory.{field}", name), config)
    if "architecture" in choices:  # a memory of several matrices that starts at zero would stay there
        choices["learned_start"] = rule.learned_start or not choices["architecture"].linear
    if config.momentum is not None and config.momentum != rule.algorithm.has_momentum:
        plain = algorithms.gradient_descent()
        if rule.algorithm not in (plain, algorithms.momentum()):
            raise ConfigError(
                f"model.memory.momentum is {config.momentum}; the algorithm of {config.preset}, {rule.algorithm}, "
                "knows no momentum: leave it None"
            )
        choices["algorithm"] = algorithms.momentum() if config.momentum else plain
    rule = dataclasses.replace(rule, **choices)
    # Linear recurrent models start from zero, and a lag token is defined by the weights themselves.
    to_start = config.forget_to == "start" and rule.learned_start and not rule.retention.lags
    return dataclasses.replace(rule, forget_to_start=to_start)


def _make(make: Callable[..., Any], config: MemoryConfig) -> Any:
    """A preset's rule, or a part of it, with the arguments that are fields of the configuration."""
    names = set(inspect.signature(make).parameters) & set(CONFIGURED) - set(getattr(make, "unconfigured", ()))
    return make(**{name: getattr(config, name) for name in names})


def _preset(config: MemoryConfig) -> "Preset":
    from titans_jax.memory.rule.presets import PRESETS

    return registered(PRESETS, "model.memory.preset", config.preset)


def register(preset: "Preset") -> str:
    """Register a preset that a configuration holds as an object; returns its name.

    Raises:
      ConfigError: the object is no preset, or its name is taken by another one.
    """
    from titans_jax.memory.rule.presets import PRESETS, Preset

    if not isinstance(preset, Preset):
        raise ConfigError(f"model.memory.preset is {preset!r}; use a registered name or a titans_jax.memory Preset")
    if PRESETS.get(preset.name) != preset:
        file = preset.make.__code__.co_filename
        try:  # only a file of the user's own is one that may be run again
            PRESETS.add(preset.name, preset, "" if PACKAGE in Path(file).parents else file)
        except ValueError as error:
            raise ConfigError(f"model.memory.preset: {str(error).rstrip('.')}") from error
    return preset.name


def registered(registry: Mapping[str, Any], field: str, name: str) -> Any:
    """The part that a field names.

    Raises:
      ConfigError: there is none, with all that there are and the nearest.
    """
    if name not in registry:
        *names, last = registry
        several = f"{', '.join(names)} or {last}" if names else last
        raise ConfigError(f"{field} is {name!r}; use {several}{did_you_mean(str(name), registry)}")
    return registry[name]
