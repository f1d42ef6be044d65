"""Command-line arguments to a dataclass, by one call of tyro; what tyro refuses becomes an error of one sentence."""

import contextlib
import dataclasses
import io
import typing
from collections.abc import Callable, Iterator
from typing import Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from titans_jax.config import ConfigError, unknown_field
from titans_jax.config.hints import describe, nearest

TYPES = ConstructorRegistry()
"""How values are read that tyro would read in another way."""


@TYPES.primitive_rule
def _bool(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[bool] | None:
    """--flag, --flag True or --flag False."""
    if kind.type is not bool:
        return None

    def read(words: list[str]) -> bool:
        if words not in ([], ["True"], ["False"]):
            raise ValueError(f"{words[0]} is neither True nor False")
        return words != ["False"]

    return PrimitiveConstructorSpec(
        nargs=(0, 1),
        metavar="[True|False]",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def parse(program: str, kind: type, arguments: list[str], default: Any = None) -> Any:
    """An instance of the dataclass `kind`, made from `default` if there is one, with the fields that the arguments set.

    --help among the arguments prints the fields and ends the process.

    Raises:
      ConfigError: an unknown field, one that is given twice, or a value of a wrong type.
    """
    arguments = _with_texts(kind, arguments)
    names = [name for name, *_ in _groups(arguments)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} is given {names.count(name)} times; give it once")

    def read(words: list[str]) -> Any:
        return tyro.cli(
            kind,
            prog=program,
            args=words,
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff, tyro.conf.PositionalMetavarFromFieldName),
            registry=TYPES,
            **({} if default is None else {"default": default}),
        )

    if {"--help", "-h"} & {*arguments}:
        read(["--help"])
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return read(arguments)
    except SystemExit:
        raise _refusal(program, kind, arguments, read) from None


def _refusal(program: str, kind: type, arguments: list[str], read: Callable[[list[str]], Any]) -> ConfigError:
    """The error for arguments that tyro refuses; to find the wrong field, tyro is asked about each field alone."""

    def refused(words: list[str]) -> bool:
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                read(words)
        except SystemExit:
            return True
        return False

    fields = dict(_fields(kind))
    (_, *words), *groups = _groups(arguments)
    if refused(words):
        needed = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
        if len(words) < len(needed):
            return ConfigError(f"{program} needs {needed[len(words)].upper()}; see {program} --help")
        return ConfigError(f"{words[-1]} has no field in front; write --field {words[-1]}")
    for name, *_ in groups:
        if name not in fields:
            return unknown_field(name, fields)
    for name, *values in groups:
        if refused([*words, f"--{name}", *values]):
            said = f"is {' '.join(values)!r}" if values else "has no value"
            return ConfigError(f"{name} {said}; use {describe(fields[name])}{nearest(' '.join(values), fields[name])}")
    return ConfigError(f"{' '.join(arguments)} cannot be read; see {program} --help")


def _with_texts(kind: type, arguments: list[str]) -> list[str]:
    """The arguments, with texts that begin with a hyphen joined to their fields: --field=text."""
    fields, joined, rest = dict(_fields(kind)), [], list(arguments)
    while rest:
        argument = rest.pop(0)
        is_text = fields.get(argument[2:].replace("-", "_")) in (str, str | None) and argument.startswith("--")
        if is_text and rest and rest[0].startswith("-") and not _is_field(rest[0], fields):
            argument = f"{argument}={rest.pop(0)}"
        joined.append(argument)
    return joined


def _is_field(argument: str, fields: dict[str, Any]) -> bool:
    name = argument[2:].partition("=")[0].replace("-", "_")
    return argument in ("--help", "-h") or argument.startswith("--") and name in fields


def _groups(arguments: list[str]) -> list[list[str]]:
    """A list [field, value, ..] for each field, after ["", word, ..] with the words in front of all fields."""
    groups = [[""]]
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            groups.append([name.replace("-", "_"), *([value] if equals else [])])
        else:
            groups[-1].append(argument)
    return groups


def _fields(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and types of the fields that are set by --name, of nested dataclasses too."""
    marked, plain = typing.get_type_hints(kind, include_extras=True), typing.get_type_hints(kind)
    for f in dataclasses.fields(kind):
        if dataclasses.is_dataclass(plain[f.name]):
            yield from _fields(plain[f.name], f"{prefix}{f.name}.")
        elif marked[f.name] != tyro.conf.Positional[plain[f.name]]:
            yield prefix + f.name, plain[f.name]
