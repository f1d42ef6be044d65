"""Checks the shapes that the package's annotations promise, in real calls.

The package names shapes in jaxtyping's words under `TYPE_CHECKING` only, so that it runs without it. Here annotations
are resolved, and every call is checked: each argument, the result, and that one name is one size in all of them.
"""

import dataclasses
import functools
import inspect
import sys
import types
import typing

import beartype
import jaxtyping
from beartype.door import is_bearable

NAMES = {name: getattr(jaxtyping, name) for name in ("Array", "Bool", "Float", "Int", "Num", "Shaped", "PRNGKeyArray")}


def hints(owner) -> dict[str, object]:
    """The annotations of a function or a class, resolved."""
    return typing.get_type_hints(owner, vars(sys.modules[owner.__module__]) | NAMES, include_extras=True)


def names_shapes(function) -> bool:
    """Whether its annotations name a shape."""
    return any(f"{name}[" in str(annotation) for annotation in function.__annotations__.values() for name in NAMES)


def checked(function):
    """The function, whose calls raise jaxtyping.TypeCheckError where an annotation does not hold."""
    resolved = hints(function)
    twin = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__, twin.__module__, twin.__qualname__ = (
        function.__kwdefaults__,
        function.__module__,
        function.__qualname__,
    )
    twin.__annotations__ = resolved
    return jaxtyping.jaxtyped(twin, typechecker=beartype.beartype)


def check_calls(monkeypatch, *modules) -> set[str]:
    """Check all calls of these modules' functions, wherever the package has imported them; what was called goes into
    the set that is returned."""
    called = set()

    def recording(function):
        check = checked(function)

        @functools.wraps(function)
        def record(*arguments, **options):
            called.add(function.__name__)
            return check(*arguments, **options)

        return record

    package = [module for name, module in sys.modules.items() if name.partition(".")[0] == "titans_jax"]
    for module in modules:
        own = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]
        for function in filter(names_shapes, own):
            record = recording(function)
            for place in package:
                for name in [name for name, value in vars(place).items() if value is function]:
                    monkeypatch.setattr(place, name, record)
    return called


def assert_fields(value) -> None:
    """The fields of a dataclass or a NamedTuple are what its annotations say, with one size for one name."""
    fields = value._fields if isinstance(value, tuple) else [field.name for field in dataclasses.fields(value)]
    resolved = hints(type(value))
    with jaxtyping.jaxtyped("context"):
        for name in fields:
            field = getattr(value, name)
            shapes = [getattr(leaf, "shape", leaf) for leaf in (field if isinstance(field, tuple) else (field,))]
            assert is_bearable(field, resolved[name]), f"{type(value).__name__}.{name} has {shapes}"
