"""Capabilities: what a part of a rule says about its own formula, for the forms that need to know.

A capability is a class attribute (`Architecture.linear`), so that a part from outside the package has it by declaring
it, and no form asks for a class. It belongs to a formula: a subclass with another formula does not inherit it, or a
closed form would be chosen that computes the old one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def drop_inherited(cls: type, capabilities: Mapping[str, Any], formula: tuple[str, ...]) -> None:
    """For `__init_subclass__`: set capabilities of a class that defines one of the methods `formula` back to the given
    values, but for those that the class declares itself."""
    own = vars(cls)
    if any(name in own for name in formula):
        for name, value in capabilities.items():
            if name not in own:
                setattr(cls, name, value)
