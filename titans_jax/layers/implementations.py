"""Operations with several implementations: the first one that supports the arguments runs, as in tokamax."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def always(*arguments: Any, **options: Any) -> bool:
    """Support everything: what the last implementation of an operation does."""
    return True


@dataclass(frozen=True)
class Implementation(Generic[Arguments, Result]):
    """One way to compute an operation; all of them take the same arguments and agree to rounding.

    run: computes it.
    supports: whether it runs for these arguments, by their shapes and dtypes and by `ops.backend.current_backend()`.
    """

    name: str
    run: Callable[Arguments, Result]
    supports: Callable[Arguments, bool] = always


def dispatch(
    implementations: Sequence[Implementation[Arguments, Result]],
    *arguments: Arguments.args,
    **options: Arguments.kwargs,
) -> Result:
    """Run the first of `implementations` that supports the arguments."""
    chosen = next(each for each in implementations if each.supports(*arguments, **options))
    return chosen.run(*arguments, **options)
