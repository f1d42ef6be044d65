"""The text of `--help` for a configuration: a short list of all fields, or a section's fields with their meanings.

titans train quickstart --help                  every field with its value, by section
titans train quickstart --help model.memory     what the fields of a section, or one field, mean
titans train quickstart --help all              what all fields mean
"""

import ast
import dataclasses
import functools
import inspect
import shutil
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from titans_jax.config import ConfigError, did_you_mean, leaves
from titans_jax.config.hints import describe


def describe_fields(program: str, config: Any, asked: str | None) -> str:
    """The help text: a short list of all fields, or the meanings of those asked for.

    Args:
      config: a dataclass; the dataclasses in it are the sections, its other fields are options of the command.
      asked: a section or a field by its dotted name, "all", or None for the short form.

    Raises:
      ConfigError: there is no such section or field.
    """
    sections = dict(_sections(config))
    if asked is None:
        return _short(program, sections)
    chosen = {
        name: section for name, section in sections.items() if asked == "all" or f"{name}.".startswith(f"{asked}.")
    }
    if chosen:
        return "\n".join(_long(name, section, list(_own(section))) for name, section in chosen.items())
    section, _, field = asked.removeprefix("--").rpartition(".")
    if section in sections and field in _own(sections[section]):
        return _long(section, sections[section], [field])
    raise ConfigError(f"there is no section or field {asked}{did_you_mean(asked, [*sections, *leaves(config)])}")


def _sections(config: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dataclasses by dotted name, `config` itself as "", each before those inside it."""
    yield name, config
    for f in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, f.name)):
            yield from _sections(value, f"{name}.{f.name}".removeprefix("."))


def _own(section: Any) -> dict[str, Any]:
    """Fields of a dataclass that are not sections, with their values."""
    values = {f.name: getattr(section, f.name) for f in dataclasses.fields(section)}
    return {name: value for name, value in values.items() if not dataclasses.is_dataclass(value)}


def _short(program: str, sections: dict[str, Any]) -> str:
    text = f"usage: {program} [--field value ...]\n\nThe fields, and their values here. What they mean:\n"
    text += f"{program} --help SECTION, or all\n"
    for name, section in sections.items():
        words = [f"--{f'{name}.' * bool(name)}{field} {_said(value)}" for field, value in _own(section).items()]
        if words:
            text += f"\n{name or 'options'}\n{_filled([word.replace(' ', chr(0)) for word in words])}\n"
    return text


def _filled(words: list[str]) -> str:
    """Words in lines as wide as the terminal; a chr(0) in a word stands for a space that no line ends at."""
    width = min(shutil.get_terminal_size().columns, 100)
    lines = textwrap.wrap("   ".join(words), width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False,
                          break_long_words=False)  # fmt: skip
    return "\n".join(lines).replace(chr(0), " ")


def _long(name: str, section: Any, fields: list[str]) -> str:
    """The fields of a section: name, value, type, and the string under the field in the code."""
    texts, types = _texts(type(section)), typing.get_type_hints(type(section))
    width = min(shutil.get_terminal_size().columns, 100)
    blocks = []
    for field in fields:
        head = f"--{f'{name}.' * bool(name)}{field} {_said(getattr(section, field))}   ({describe(types[field])})"
        body = textwrap.fill(texts.get(field, ""), width, initial_indent="    ", subsequent_indent="    ")
        blocks.append(f"{head}\n{body}\n")
    return "".join(blocks)


def _said(value: Any) -> str:
    """A value as it is written on the command line."""
    return " ".join(map(str, value)) or "()" if isinstance(value, tuple) else str(value)


@functools.cache
def _texts(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass and of its base classes."""
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        (body,) = [node.body for node in ast.parse(textwrap.dedent(inspect.getsource(each))).body]
        for field, text in zip(body, body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return texts
