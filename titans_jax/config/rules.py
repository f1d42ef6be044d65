"""What a memory's configuration stands for: its rule and its gates, from the registries of `titans_jax.memory`.

jax is imported by the first call, so that a configuration is read, and help given, without it.
"""

import ast
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_jax.config.arguments import check_arguments, parameters_of
from titans_jax.config.memory_config import MemoryConfig
from titans_jax.config.schema import ConfigError, ModelConfig
from titans_jax.registry import PACKAGE, did_you_mean

if TYPE_CHECKING:
    from titans_jax.memory.caching import Aggregation
    from titans_jax.memory.rule.gate_choices import GateChoices
    from titans_jax.memory.rule.presets import Preset
    from titans_jax.memory.rule.rule import MemoryRule

CONFIGURED = ("depth", "expansion", "chunk_size", "p", "q", "steps", "mimo_rank", "omega_window")
"""Fields whose values are passed to presets and parts that have an argument of the same name."""


def memory_rule(config: MemoryConfig) -> "MemoryRule":
    """The rule that a configuration describes: its preset's, with the choices it replaces.

    Raises:
      ConfigError: choices that are impossible, or that exclude each other.
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
      ConfigError: there is no such preset, or its gates cannot be changed as the other fields say.
    """
    from titans_jax.memory.rule.gate_choices import OPEN_BIAS, SPREAD_BIAS

    gates, changed, rule = _preset(config).gates, {}, memory_rule(config)
    if gates.step_size == "bounded":
        changed["step_size"] = _first_steps(config, rule)
    to_start = rule.forget_to_start
    if config.forget_bias is not None:
        changed["forget_bias"] = config.forget_bias
    elif to_start:
        # What a stale memory forgets within its chunk was never read, so over a whole long chunk it still keeps 1/e.
        slow = min(OPEN_BIAS, -math.log(max(rule.chunk_size - 1, 1)))
        changed["forget_bias"] = slow if rule.stale else SPREAD_BIAS
    if gates.rotated_keys and config.forget == "never":
        raise ConfigError(f"model.memory.forget is never; {config.preset} forgets by what turns its keys: use auto")
    keeps = (gates.retention, gates.key, gates.value) == ("keep", None, None)
    if keeps and (config.forget == "always" or (config.forget == "auto" and to_start)):
        changed["retention"] = "forget"
    elif not keeps and config.forget == "never":
        changed |= {"retention": "keep", "key": None, "value": None}
    if config.channel_retention not in (None, "none") and rule.algorithm.whole_tokens:
        raise ConfigError(
            f"model.memory.channel_retention is {config.channel_retention}; use None, as {config.preset} weighs whole "
            f"tokens{' of its window' if rule.algorithm.window > 1 else ''}"
        )
    if config.channel_retention is not None:
        sides = {"none": (), "both": ("key", "value")}.get(config.channel_retention, (config.channel_retention,))
        changed |= {side: "forget" if side in sides else None for side in ("key", "value")}
    if config.shared_gates:
        changed["shared"] = True
    if config.channel_steps not in (None, "none") and (why := _one_step(gates, rule)):
        raise ConfigError(f"model.memory.channel_steps is {config.channel_steps}; use None, as {config.preset} {why}")
    if config.channel_steps is not None:
        changed["channel_steps"] = False if config.channel_steps == "none" else config.channel_steps
    try:
        made = dataclasses.replace(gates, **changed)
    except ValueError as error:  # HGRN2's keys are made of what is kept, Mamba2's step is that of its retention
        raise ConfigError(
            f"model.memory.forget is {config.forget} and channel_retention {config.channel_retention}; the gates of "
            f"{config.preset} cannot be changed so ({str(error).rstrip('.')}): use auto and None"
        ) from error
    if made.key and made.value and rule.algorithm.has_momentum and len(rule.shapes(2)) == 1:
        raise ConfigError(
            f"model.memory.channel_retention is {config.channel_retention}, and a memory of one matrix with momentum "
            "forgets by the channels of one side at most; use key, value or none, or model.memory.momentum False"
        )
    return made


def _first_steps(config: MemoryConfig, rule: "MemoryRule") -> str:
    """The name of the gate of bounded steps, which says how large they are at first."""
    sized, in_chunks, of_error = sizes_values(config), rule.chunk_size > 1, config.step_unit == "error"
    momentum, uneven = sized and rule.algorithm.has_momentum, sized and rule.retention.uneven
    # Momentum doubles a step. A long chunk's writes, all taken at its start, add up: with 64, a sixth reads text worse.
    if momentum and of_error and not uneven and rule.chunk_size <= 16:
        return "bounded_sixth"
    # Half of the largest step removes more than all of the error, and larger values make the loss steeper.
    if momentum or uneven or (in_chunks and limits_steps(config)):
        return "bounded_low"
    # Behind several matrices it removes more than twice the error from some directions. Token by token that stays, as
    # memories that reflect need it (parity), but not on logits, where steps act as factors.
    several = len(rule.shapes(2)) > 1 and of_error
    return "bounded_third" if sized and several and (in_chunks or rule.retention.positive) else "bounded"


def _one_step(gates: "GateChoices", rule: "MemoryRule") -> str:
    """Why tokens of this rule cannot have a step size per channel, "" where they can."""
    if rule.algorithm.whole_tokens:
        return "weighs whole tokens"
    if rule.algorithm.steps > 1:
        return f"takes {rule.algorithm.steps} steps a token"
    if rule.algorithm.keeps_statistics:
        return "keeps sums of all tokens, which take no steps"
    return "has steps of the channels of its keys" if gates.preconditioned else ""


def sizes_values(config: MemoryConfig) -> bool:
    """Whether values are scaled to the size of a normalised memory's reads (`normalize_values`)."""
    if config.normalize_values is not None:
        return config.normalize_values
    return memory_rule(config).architecture.normalized


def skips_values(config: MemoryConfig) -> bool:
    """Whether a token's own values are added to the memory's read (`value_skip`).

    Raises:
      ConfigError: `value_skip` is True, and a token has several values.
    """
    rule = memory_rule(config)
    several = _preset(config).gates.projected_steps(rule)
    if config.value_skip and several > 1:
        raise ConfigError(
            f"model.memory.value_skip is True, and a token has {several} values with preset {config.preset}; use False"
        )
    if config.value_skip is not None:
        return config.value_skip
    added = sizes_values(config) or rule.retention.positive or _linear_from_learned(rule)
    return several == 1 and added


def projects_skip(config: MemoryConfig) -> bool:
    """Whether the values that `value_skip` adds have their own projection (`skip_projection`).

    Raises:
      ConfigError: `skip_projection` is True, and nothing is added.
    """
    added = skips_values(config)
    if config.skip_projection and not added:
        raise ConfigError(
            "model.memory.skip_projection is True, and nothing is added to what this memory says; use False, or "
            "model.memory.value_skip True"
        )
    return added and ties_keys(config) if config.skip_projection is None else config.skip_projection


def ties_keys(config: MemoryConfig) -> bool:
    """Whether a token's key is the query of the token before (`tie_keys`).

    Raises:
      ConfigError: `tie_keys` is True, and a token has several keys, or keys that are gates.
    """
    gates, rule = _preset(config).gates, memory_rule(config)
    several = gates.projected_steps(rule) > 1
    if config.tie_keys and (gates.complement_keys or several):
        what = "keys that are gates" if gates.complement_keys else "several keys"
        raise ConfigError(
            f"model.memory.tie_keys is True, and a token has {what} with preset {config.preset}; use False"
        )
    if config.tie_keys is not None:
        return config.tie_keys
    taught = rule.architecture.normalized or _linear_from_learned(rule)
    return taught and not gates.complement_keys and skips_values(config)


def gates_predictions(config: MemoryConfig) -> bool:
    """Whether the output's gate sees how well reads predicted (`prediction_gate`); ConfigError: they cannot predict."""
    tied = ties_keys(config) and not _preset(config).gates.rotated_keys
    if config.prediction_gate and not tied:
        why = f"with keys that turn, as those of {config.preset}," if ties_keys(config) else "without tied keys"
        raise ConfigError(f"model.memory.prediction_gate is True, and {why} reads predict nothing; use False")
    return tied if config.prediction_gate is None else config.prediction_gate


def _linear_from_learned(rule: "MemoryRule") -> bool:
    """Whether a memory is one matrix with a learned start, unlike those of linear recurrent models."""
    return rule.architecture.linear and rule.learned_start


def limits_steps(config: MemoryConfig) -> bool:
    """Whether steps are limited by the share of their error that they remove: those of a linear memory, which has no
    norm that would bound their effect (`bound_slope`)."""
    wanted = config.bound_slope and config.step_unit == "error"
    return wanted and _preset(config).gates.bounded and memory_rule(config).architecture.linear


def cache_aggregation(config: MemoryConfig) -> "Aggregation | None":
    """The aggregation that reads kept memories, None where none are kept.

    Raises:
      ConfigError: there is no such aggregation, a segment is not a whole number of chunks, or segments that restart
        would be merged.
    """
    if config.caching is None:
        return None
    from titans_jax.memory.caching import AGGREGATIONS

    part, arguments = _called("model.memory.caching", config.caching, AGGREGATIONS)
    chunk_size = memory_rule(config).chunk_size
    if config.cache_segment % chunk_size:
        below = max(config.cache_segment // chunk_size, 1) * chunk_size
        raise ConfigError(
            f"model.memory.cache_segment is {config.cache_segment}; use a multiple of model.memory.chunk_size "
            f"{chunk_size}, such as {below}"
        )
    if config.cache_restart and config.cache_segmentation != "constant":
        raise ConfigError(
            f"model.memory.cache_restart is True, and model.memory.cache_segmentation {config.cache_segmentation!r}, "
            "whose memories have read many segments; use False, or constant"
        )
    try:
        return part(**arguments)
    except ValueError as error:
        raise ConfigError(f"model.memory.caching is {config.caching!r}; {str(error).rstrip('.')}") from error


def local_memories(config: MemoryConfig) -> tuple[MemoryConfig, ...]:
    """The configuration of each local memory, one for each of `local_chunks`.

    Raises:
      ConfigError: a shard is not a whole number of chunks, or `caching` is set too.
    """
    chunks, shard, chunk_size = config.local_chunks, config.shard, config.chunk_size
    if not chunks:
        return ()
    if config.caching is not None:
        raise ConfigError(
            f"model.memory.local_chunks is {chunks}, and model.memory.caching {config.caching!r}; use one of them, as "
            "local memories are not kept"
        )
    for chunk in chunks:
        if chunk < 1 or shard % chunk:
            raise ConfigError(
                f"model.memory.local_chunks is {chunks}; use chunks of 1 or more tokens that divide model.memory.shard "
                f"{shard}, which {chunk} does not"
            )
    if max(shard, chunk_size) % min(shard, chunk_size):
        raise ConfigError(
            f"model.memory.shard is {shard}; use a multiple or a divisor of model.memory.chunk_size {chunk_size}, such "
            f"as {chunk_size}"
        )
    return tuple(dataclasses.replace(config, local_chunks=(), chunk_size=chunk) for chunk in chunks)


def check_levels(config: MemoryConfig) -> None:
    """Refuse `log_linear_levels` for a memory that cannot be split into parts.

    Raises:
      ConfigError: the number is negative or larger than positions have bits, the memory is not linear in one value per
        token, or `caching` or `local_chunks` is set too.
    """
    from titans_jax.memory.log_linear import MOST_LEVELS, splits_into_levels

    levels = f"model.memory.log_linear_levels is {config.log_linear_levels}"
    if not 0 <= config.log_linear_levels <= MOST_LEVELS:
        raise ConfigError(f"{levels}; use 0 to {MOST_LEVELS}, 10 for texts of 1,024 tokens")
    if not config.log_linear_levels:
        return
    gates, rule = gate_choices(config), memory_rule(config)
    if not splits_into_levels(rule) or gates.value_gate or "value" in gates.step_sides:
        raise ConfigError(
            f"{levels}, and what {config.preset} holds is no sum over its tokens' values, one a token, without chunks, "
            "forgotten whole; use 0, or a preset such as gated_deltanet, mamba2 or gla"
        )
    if config.caching is not None or config.local_chunks:
        other = "local_chunks" if config.local_chunks else "caching"
        raise ConfigError(f"{levels}, and model.memory.{other} {getattr(config, other)!r}; use one of them")


def step_size_bound(model: ModelConfig) -> float:
    """The largest step size of a memory whose step size is bounded: the factor of its gradients.

    A stale memory takes all steps of its long chunk from the chunk's start. Keys that are spread evenly over head_dim
    directions share each direction with chunk_size / head_dim others, so steps are smaller by that factor.
    """
    from titans_jax.memory.step_unit import error_removed

    memory, rule = model.memory, memory_rule(model.memory)
    unit = model.head_dim if memory.step_unit == "head_dim" else error_removed(rule, model.head_dim)
    together = max(1, rule.chunk_size / model.head_dim) if rule.stale else 1
    return memory.max_step_size / unit / together


def _memory_rule(config: MemoryConfig) -> "MemoryRule":
    from titans_jax.memory.rule.architectures import ARCHITECTURES
    from titans_jax.memory.rule.biases import BIASES
    from titans_jax.memory.rule.retentions import RETENTIONS

    if config.omega_window is not None and not 1 <= config.omega_window <= config.chunk_size:
        raise ConfigError(
            f"model.memory.omega_window is {config.omega_window}; use None, or 1 to chunk_size {config.chunk_size}, as "
            "it reaches at most into the chunk before"
        )
    rule = _make(_preset(config).make, config)
    choices = {"orthogonal_start": config.orthogonal_start}
    for field, registry in (("architecture", ARCHITECTURES), ("bias", BIASES), ("retention", RETENTIONS)):
        if (said := getattr(config, field)) is not None:
            part, arguments = _called(f"model.memory.{field}", said, registry)
            choices[field] = _make(part, config, arguments)
    if "architecture" in choices:  # a memory of several matrices that starts at zero would stay there
        choices["learned_start"] = rule.learned_start or not choices["architecture"].linear
    if config.momentum is not None:
        choices["algorithm"] = rule.algorithm.with_momentum(config.momentum)
        if choices["algorithm"] is None:
            raise ConfigError(
                f"model.memory.momentum is {config.momentum}; the algorithm of {config.preset}, {rule.algorithm}, "
                f"{'always has' if rule.algorithm.has_momentum else 'knows no'} momentum: leave it None"
            )
    rule = dataclasses.replace(rule, **choices)
    if config.start is not None:
        rule = _started(config, rule)
    # Linear recurrent models start from zero, and a lag token is defined by the weights themselves.
    to_start = config.forget_to == "start" and rule.learned_start and not rule.retention.lags
    bound_slope = config.bound_slope and rule.architecture.slope_known
    bias = rule.bias.bounded() if bound_slope and config.bias is None else rule.bias  # one that is named is as named
    scaled = not rule.retention.positive if config.scale_keys is None else config.scale_keys
    network = rule.architecture.with_scaled_keys() if scaled else rule.architecture
    rule = dataclasses.replace(rule, architecture=network, bias=bias, forget_to_start=to_start, bound_slope=bound_slope)
    return _stale(config, rule) if config.local_chunks else rule


def _started(config: MemoryConfig, rule: "MemoryRule") -> "MemoryRule":
    """The rule with the start that the configuration names.

    Raises:
      ConfigError: the rule cannot have that start.
    """
    if config.start != "zero":
        if rule.learned_start:
            return rule
        raise ConfigError(f"model.memory.start is {config.start}; use zero, as {config.preset} starts from there")
    why = None
    if rule.architecture.normalized:
        why = f"the norm of {rule.architecture} multiplies the gradients of a zero matrix by 1 / sqrt(1e-6) = 1000"
    elif len(rule.shapes(2)) > 1:
        why = f"no matrix of {rule.architecture} has a gradient where the others are zero"
    elif not rule.retention.linear:
        why = f"{rule.retention} maps what is carried to weights, and has no slope at zero"
    if why is None:
        return dataclasses.replace(rule, learned_start=False)
    raise ConfigError(f"model.memory.start is zero; use learned or fixed, as {why}")


def _stale(config: MemoryConfig, rule: "MemoryRule") -> "MemoryRule":
    """The rule made stale: read as it was at its chunk's start (`MemoryRule.stale`).

    Raises:
      ConfigError: it has no chunks, or cannot be stale.
    """
    why = f"{config.preset} has no chunks" if rule.chunk_size != config.chunk_size else None
    try:
        if why is None:
            return dataclasses.replace(rule, stale=True)
    except ValueError:
        why = f"{config.preset} takes no gradients of single tokens at a chunk's start"
    raise ConfigError(
        f"model.memory.local_chunks is {config.local_chunks}; use (), as {why}, or a preset such as titans or ttt_mlp"
    )


def _make(make: Callable[..., Any], config: MemoryConfig, said: Mapping[str, Any] | None = None) -> Any:
    """A preset's rule, or a part of it, with arguments from the configuration's fields and, before these, from
    `said`."""
    names = set(inspect.signature(make).parameters) & set(CONFIGURED) - set(getattr(make, "unconfigured", ()))
    return make(**{name: getattr(config, name) for name in names} | dict(said or {}))


def read_call(field: str, said: str) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of "name" or "name(argument=value, ...)", values being literals.

    Raises:
      ConfigError: it is neither.
    """
    name, opened, _ = said.partition("(")
    if not opened:
        return said, {}
    try:
        call = ast.parse(said, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError
        return call.func.id, {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        raise ConfigError(f"{field} is {said!r}; use a name, or {name}(argument=value)") from None


def _called(field: str, said: str, registry: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The part that a field names, and the arguments in brackets behind the name.

    Raises:
      ConfigError: there is no such part, or it does not take them.
    """
    name, arguments = read_call(field, said)
    part = registered(registry, field, name)
    check_arguments(field, said, parameters_of(part), arguments)
    return part, arguments


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
      ConfigError: there is no such part; the message lists all parts and the nearest name.
    """
    if name not in registry:
        *names, last = registry
        several = f"{', '.join(names)} or {last}" if names else last
        raise ConfigError(f"{field} is {name!r}; use {several}{did_you_mean(str(name), registry)}")
    return registry[name]
