"""The checks of a configuration: types, ranges, and fields that must fit together.

They run before anything is compiled or written. A refusal is one sentence with the field, its value and what would
work.
"""

import dataclasses
import itertools
import math
import re
import typing
from typing import Any

import jax

from titans_jax.config import (
    Config,
    ConfigError,
    ModelConfig,
    ProcessesConfig,
    cache_aggregation,
    check_levels,
    gate_choices,
    gates_predictions,
    import_extensions,
    leaves,
    local_memories,
    memory_rule,
    projects_skip,
)
from titans_jax.config.hints import describe, matches, nearest


def validate(config: Config) -> None:
    """Refuse a configuration that cannot work.

    What the blocks require of a model, `titans_jax.models.check_model` checks; what a source requires, the source.

    Raises:
      ConfigError: one sentence with the field, its value and what would work.
    """
    check_types(config)
    import_extensions(config.extensions)
    if config.model.dtype == "float64" and not jax.config.jax_enable_x64:
        raise ConfigError("model.dtype is float64; set JAX_ENABLE_X64=1 in the environment, or use float32")
    _validate_ranges(config)
    _validate_model(config.model)
    _validate_batch(config)
    _validate_rows(config)
    validate_processes(config.processes)
    _validate_profile(config)


def check_types(config: Any, prefix: str = "") -> None:
    """Refuse a configuration, or a part of one, with a value of a wrong type; raises as `validate`."""
    hints = typing.get_type_hints(type(config))
    for f in dataclasses.fields(config):
        name, value, hint = prefix + f.name, getattr(config, f.name), hints[f.name]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, hint):
                raise ConfigError(f"{name} is {value!r}; use a {hint.__name__}")
            check_types(value, name + ".")
        elif not matches(value, hint):
            raise ConfigError(f"{name} is {value!r}; use {describe(hint)}{nearest(value, hint)}")


_AT_LEAST_ONE = (
    "model.dim model.depth model.num_heads model.head_dim model.vocab_size model.segment model.window model.conv_size "
    "model.memory.depth model.memory.expansion model.memory.chunk_size model.memory.steps "
    "model.memory.mimo_rank model.memory.cache_segment model.memory.shard "
    "data.sequence_length data.batch_size "
    "training.steps training.gradient_accumulation training.log_every training.evaluate_every "
    "training.evaluation_batches training.evaluate_samples training.evaluate_length training.diagnostics_every "
    "training.checkpoint_every training.checkpoints_kept"
).split()
_AT_LEAST_ZERO = (
    "model.num_persistent model.document_slack optimizer.warmup_steps optimizer.weight_decay training.sample_tokens "
    "training.z_loss"
).split()
_ABOVE_ZERO = (
    "model.embedding_scale model.rope_theta model.norm_eps model.memory.max_step_size optimizer.learning_rate "
    "optimizer.clip_norm optimizer.epsilon"
).split()

_LARGEST = 1 << 30
"""The largest whole number of most fields: devices count with 32 bits, and a sum of two numbers must fit."""
_COUNTED_HERE = ("seed", "_every", "_kept")
"""Ends of the names of fields whose whole numbers no device counts with; seeds have a range of their own."""
_LARGEST_REAL = 3e38
"""Devices compute with float32, where larger numbers are infinite."""


def _validate_ranges(config: Config) -> None:
    values = leaves(config)

    def require(names: list[str], holds: Any, what: str) -> None:
        for name in names:
            if not holds(values[name]):
                raise ConfigError(f"{name} is {values[name]}; use {what}")

    require(_AT_LEAST_ONE, lambda x: x >= 1, "at least 1")
    require(_AT_LEAST_ZERO, lambda x: 0 <= x < float("inf"), "at least 0")
    require(["training.seed", "data.seed"], lambda x: 0 <= x < 1 << 32, f"0 to {(1 << 32) - 1}")
    require(_ABOVE_ZERO, lambda x: 0 < x < float("inf"), "a positive number")
    require(["optimizer.beta1", "optimizer.beta2"], lambda x: 0 <= x < 1, "a number in [0, 1)")
    require(["optimizer.ema"], lambda x: x is None or 0 <= x < 1, "a number in [0, 1), or None")
    require(["optimizer.final_learning_rate_ratio"], lambda x: 0 <= x <= 1, "a number in [0, 1]")
    require(["model.memory.depth"], lambda x: x <= 4, "1 to 4")
    require(["model.memory.forget_bias"], _is_start, "a finite number, two of them, or None")
    require(["model.hidden_dim", "model.memory.gate_rank"], lambda x: x is None or x >= 1, "at least 1, or None")
    require(
        ["data.validation_every"], lambda x: x >= 2 or x == 0, "at least 2, so that something is left to train on, or 0"
    )
    axes = ["mesh.slice", "mesh.data", "mesh.fsdp", "mesh.tensor"]
    require(axes, lambda x: x >= 1 or x == -1, "at least 1, or -1 for the rest")
    if [values[axis] for axis in axes].count(-1) > 1:
        raise ConfigError(f"mesh has several axes set to -1; use -1 on one of {', '.join(axes[:-1])} and {axes[-1]}")
    _validate_sizes(values)


def _validate_sizes(values: dict[str, Any]) -> None:
    """Refuse whole numbers that devices cannot count to, and numbers that are infinite or NaN in float32. Commands that
    add fields of their own to a configuration check those themselves."""
    for name, default in leaves(Config()).items():
        value = values[name]
        for number in value if isinstance(value, tuple) else (value,):
            real = isinstance(number, float) or isinstance(default, float)
            if real and not abs(number) <= _LARGEST_REAL:
                raise ConfigError(f"{name} is {value}; use a number from -{_LARGEST_REAL:g} to {_LARGEST_REAL:g}")
            if not real and isinstance(number, int) and number > _LARGEST and not name.endswith(_COUNTED_HERE):
                raise ConfigError(f"{name} is {value}; use at most {_LARGEST}")


def _is_start(value: float | tuple[float, ...] | None) -> bool:
    """Whether this is a valid `forget_bias`: None, a finite number, or two."""
    numbers = value if isinstance(value, tuple) else (value, value)
    return value is None or (len(numbers) == 2 and all(map(math.isfinite, numbers)))


def _validate_model(model: ModelConfig) -> None:
    width = model.num_heads * model.head_dim
    if width != model.dim:
        head_dim, rest = divmod(model.dim, model.num_heads)
        works = f"model.dim {width}" if rest else f"model.head_dim {head_dim}"
        raise ConfigError(
            f"model.head_dim {model.head_dim} x model.num_heads {model.num_heads} is {width}, "
            f"not model.dim {model.dim}; use {works}"
        )
    if model.head_dim % 2:
        raise ConfigError(f"model.head_dim is {model.head_dim}; use an even number, for the rotary embedding")
    try:
        shapes = memory_rule(model.memory).shapes(model.head_dim)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"model.memory.architecture: {str(error).rstrip('.')}") from error
    gates = gate_choices(model.memory)
    for side, gate, channels in (("key", gates.key, shapes[0][0]), ("value", gates.value, shapes[-1][1])):
        if channels != model.head_dim and (gate or side in gates.step_sides):
            raise ConfigError(
                f"model.memory.{'channel_retention' if gate else 'channel_steps'} gives each of model.head_dim "
                f"{model.head_dim} {side} channels a gate, and this memory has {channels} of them; use none"
            )
    for decided in (projects_skip, gates_predictions):  # which ask `skips_values` and `ties_keys`
        decided(model.memory)
    if gates.rotated_keys and model.head_dim < 4:
        raise ConfigError(
            f"model.head_dim is {model.head_dim}; use 4 or more, as {model.memory.preset} turns pairs of a half of its "
            "channels"
        )
    cache_aggregation(model.memory)
    _validate_continuum(model.memory.continuum_chunks)
    local_memories(model.memory)
    check_levels(model.memory)


def _validate_continuum(chunks: tuple[int, ...]) -> None:
    multiples = all(slow % fast == 0 for fast, slow in itertools.pairwise(chunks)) if all(chunks) else False
    if not chunks or min(chunks) < 1 or not multiples:
        raise ConfigError(
            f"model.memory.continuum_chunks is {chunks}; use one or more numbers, each a multiple of the one before, "
            "such as (16, 64, 256)"
        )


def _validate_batch(config: Config) -> None:
    rows, accumulation = config.data.batch_size, config.training.gradient_accumulation
    if rows % accumulation:
        raise ConfigError(f"data.batch_size is {rows}; use a multiple of training.gradient_accumulation {accumulation}")
    head, z_loss = config.model.head, config.training.z_loss
    if z_loss and head != "language_model":
        raise ConfigError(f"training.z_loss is {z_loss}; use 0, as model.head {head} predicts no tokens")


def _validate_rows(config: Config) -> None:
    """Refuse what a memory's rows of training are too short for."""
    memory, row = config.model.memory, config.data.sequence_length
    if (memory.omega_window or 1) > row:
        raise ConfigError(f"model.memory.omega_window is {memory.omega_window}; use at most data.sequence_length {row}")
    if memory_rule(memory).algorithm.steps_by_chunk and memory.chunk_size > row:
        raise ConfigError(
            f"model.memory.chunk_size is {memory.chunk_size}; use at most data.sequence_length {row}, as "
            f"{memory.preset} makes its steps at chunks' ends, and would write nothing in training"
        )


def validate_processes(processes: ProcessesConfig) -> None:
    """Refuse processes that are described incompletely, or that cannot exist.

    Raises:
      ConfigError: names the field.
    """
    values = leaves(processes, "processes.")
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return
    if missing:
        given = next(name for name in values if name not in missing)
        raise ConfigError(f"{missing[0]} is None, but {given} is {values[given]}; give all of {', '.join(values)}")
    host, _, port = processes.coordinator.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ConfigError(
            f"processes.coordinator is {processes.coordinator!r}; use host:port of process 0, such as 10.0.0.1:8476"
        )
    if processes.count < 1:
        raise ConfigError(f"processes.count is {processes.count}; use at least 1")
    if not 0 <= processes.index < processes.count:
        raise ConfigError(
            f"processes.index is {processes.index}; use 0 to {processes.count - 1}, as processes.count is "
            f"{processes.count}"
        )


def _validate_profile(config: Config) -> None:
    steps, last = config.profile.steps, config.training.steps
    if steps is None:
        return
    form = re.fullmatch(r"([0-9]+):([0-9]+)", steps)
    if not form or not 1 <= int(form[1]) < int(form[2]):
        raise ConfigError(f"profile.steps is {steps!r}; use first:last with 1 <= first < last, such as 10:15")
    if int(form[1]) > last:
        raise ConfigError(f"profile.steps is {steps!r}, behind the last step; use a first step of at most {last}")
