"""Registries: parts of a kind by name, and a decorator that adds one from anywhere.

    BIASES = Registry("attentional bias")

    @BIASES.register()                     # as "cosine", the class's own name; or @BIASES.register("another_name")
    class Cosine(AttentionalBias): ...

    BIASES["cosine"]                       # the class; an unknown name is refused with the nearest one

Every kind of part has one: biases, retention gates, architectures and presets of a memory, ways to cache memories,
blocks, heads, data sources, evaluators, studies. A file that registers parts is imported by `Config.extensions`.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

Part = TypeVar("Part")

_registrations = 0
PACKAGE = Path(__file__).parent


class UnknownNameError(KeyError, ValueError):
    """A name under which nothing is registered: a KeyError, as for any mapping, whose text is a sentence."""

    def __str__(self) -> str:
        return self.args[0]


class Registry(Mapping[str, Part]):
    """Parts of one kind by name, in the order in which they were registered.

    kind: what a part is, in words, for messages ("attentional bias").
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._parts: dict[str, Part] = {}
        self._files: dict[str, str] = {}

    def register(self, name: str | None = None) -> Callable[[Part], Part]:
        """A decorator that adds a class or a function under `name` and returns it as it is.

        name: by default the function's name, or the class's name with underscores: NormPower is "norm_power".
        Raises ValueError for a name that is taken, unless by the same file, which is then run again.
        """
        if name is not None and not isinstance(name, str):
            raise ValueError(f"the name {name!r} of a {self.kind} is no text: write @register(...) with parentheses.")
        file = sys._getframe(1).f_code.co_filename

        def add(part: Part) -> Part:
            self.add(name or snake_case(part.__name__), part, file)
            return part

        return add

    def add(self, name: str, part: Part, file: str = "") -> None:
        """Add a part that `file` defines; see `register`."""
        global _registrations
        file = os.path.realpath(file) if file else ""
        if name in self._parts and (not file or self._files[name] != file):
            raise ValueError(f"the {self.kind} {name!r} is there already: register this one under another name.")
        self._parts[name], self._files[name] = part, file
        parents = Path(file).parents
        _registrations += PACKAGE not in parents or PACKAGE / "configs" in parents

    def __getitem__(self, name: str) -> Part:
        if name not in self._parts:
            raise UnknownNameError(
                f"there is no {self.kind} {name!r}{did_you_mean(str(name), self)}; there are {', '.join(self)}."
            )
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(self)})"


def registrations() -> int:
    """How many registrations all registries have had from outside the package; it grows with each one.

    Registrations by titans_jax itself, when its modules are imported, do not count.
    """
    return _registrations


def snake_case(name: str) -> str:
    """NormPower -> norm_power."""
    return re.sub(r"(?<=[A-Za-z0-9])(?=[A-Z])", "_", name).lower()


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """ "; did you mean ...?" with the one of `names` that looks like `name`, or nothing.

    Of dotted names those that end as `name` does come first, so that a field is found without its section.
    """
    names = list(names)
    last = name.rpartition(".")[2]
    near = [dotted for dotted in names if "." in dotted and dotted.rpartition(".")[2] == last]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
