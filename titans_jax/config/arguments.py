"""The check of arguments in brackets, as in `huber(delta=0.5)`: names, kinds and finite numbers."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from titans_jax.config.hints import describe, matches
from titans_jax.config.schema import ConfigError


def parameters_of(part: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function or a class by name, with hints as types where all names in them are known."""
    try:
        return dict(inspect.signature(part, eval_str=True).parameters)
    except NameError:  # imported for type checkers only
        return dict(inspect.signature(part).parameters)


def check_arguments(
    field: str, said: str, parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]
) -> None:
    """Refuse arguments that a part has no parameter for, or whose values are not of its parameter's kind.

    A part whose hints are no types but text, or missing, is left to check the values itself.

    Raises:
      ConfigError: names the field, the argument and what would work.
    """
    for argument, value in arguments.items():
        if argument not in parameters:
            known = ", ".join(parameters) or "nothing"
            raise ConfigError(f"{field} is {said!r}, which takes {known}, not {argument}")
        hint = parameters[argument].annotation
        if hint is inspect.Parameter.empty or isinstance(hint, str):
            continue
        try:
            works = describe(hint)
        except (KeyError, TypeError):  # a function, or an object of another part
            raise ConfigError(
                f"{field} is {said!r}, and {argument} is no value that text can say; leave it out, or register a "
                "part of your own"
            ) from None
        if not matches(value, hint):
            raise ConfigError(f"{field} is {said!r}, and {argument} is {value!r}; use {works}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{field} is {said!r}, and {argument} is {value!r}; use a finite number")
