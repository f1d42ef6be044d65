"""Command-line arguments into a dataclass: --field value, typed by the dataclass, refused in one sentence."""

import contextlib
import io
import typing
from typing import Any

from titans_jax.config import ConfigError, leaves, unknown_field
from titans_jax.config.validate import describe, nearest


def parse(program: str, kind: type, arguments: list[str], default: Any) -> Any:
    """`default` with the fields that --field value arguments set, typed by the dataclass `kind`.

    Raises:
      ConfigError: an unknown field, or a value of a wrong type.
    """
    import tyro

    options = {"prog": program, "use_underscores": True, "config": (tyro.conf.FlagConversionOff,)}
    if "--help" in arguments or "-h" in arguments:
        tyro.cli(kind, args=["--help"], default=default, **options)
    fields = leaves(default)
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            if name not in fields:
                raise unknown_field(name, fields)
            groups.append([f"--{name}", *([value] if equals else [])])
        elif groups:
            groups[-1].append(argument)
        else:
            raise ConfigError(f"{argument} has no field in front; write --field {argument}")
    for group in groups:
        if len(group) == 1 and isinstance(fields[group[0][2:]], bool):
            group.append("True")
    for group in groups:  # one by one, so that a refusal can be told in our words and name the field
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                default = tyro.cli(kind, args=group, default=default, **options)
        except SystemExit:
            name, value = group[0][2:], " ".join(group[1:])
            said = f"is {value!r}" if value else "has no value"
            hint = _type_of(kind, name)
            raise ConfigError(f"{name} {said}; use {describe(hint)}{nearest(value, hint)}") from None
    return default


def _type_of(kind: type, name: str) -> Any:
    """Type of a field by its dotted name."""
    for part in name.split("."):
        kind = typing.get_type_hints(kind)[part]
    return kind
