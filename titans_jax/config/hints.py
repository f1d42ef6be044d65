"""Type hints of fields and arguments: what matches one, and what one is called in a message."""

import types
import typing
from typing import Any, Literal

from titans_jax.registry import did_you_mean

ONE = {int: "a whole number", float: "a number", str: "text", bool: "True or False", type(None): "None"}
SEVERAL = {int: "whole numbers", float: "numbers", str: "texts"}


def matches(value: Any, hint: Any) -> bool:
    """Whether a value is of the kind that a type hint names; True is no number."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin in (types.UnionType, typing.Union):
        return any(matches(value, argument) for argument in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(matches(item, arguments[0]) for item in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def nearest(value: Any, hint: Any) -> str:
    """`did_you_mean` among the values of a Literal."""
    kinds = [hint, *typing.get_args(hint)]
    names = [x for kind in kinds if typing.get_origin(kind) is Literal for x in typing.get_args(kind)]
    return did_you_mean(str(value), names)


def describe(hint: Any) -> str:
    """What a value of this type hint looks like, in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(map(str, arguments[:-1])) + (" or " if arguments[1:] else "") + str(arguments[-1])
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is tuple:
        item = arguments[0]
        return f"one or more {SEVERAL[item]}" if item in SEVERAL else f"one or more of {describe(item)}"
    return ONE[hint]
