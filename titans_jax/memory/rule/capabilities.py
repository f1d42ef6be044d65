"""Capabilities: what a part of a rule declares about its own formula, for the forms that need to know.

A capability is a class attribute (`Architecture.linear`), so that a part from outside the package has it by declaring
it, and no form checks for a class. It belongs to a formula: a subclass with another formula does not inherit it, as a
closed form would otherwise be chosen that computes the old formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def drop_inherited(cls: type, capabilities: Mapping[str, Any], formula: tuple[str, ...]) -> None:
    """For `__init_subclass__`: if a class defines one of the methods `formula`, set its capabilities back to the given
    values, except those that it declares itself."""
    own = vars(cls)
    if any(name in own for name in formula):
        for name, value in capabilities.items():
            if name not in own:
                setattr(cls, name, value)
