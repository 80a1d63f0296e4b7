"""Shapes of arrays, as the annotations of functions say them, checked at every call: in tests, by jaxtyping.

An annotation such as `Annotated[mx.array, "B T"]`, or "int B T" of integers, costs nothing where nobody looks at it.
`watch` puts a checking function in the place of every public function and method of a package or a module that has one,
and checks the fields of its dataclasses when a value is made.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import mlx.core as mx
from beartype import beartype
from jaxtyping import Float, Int, jaxtyped


def watch(package: ModuleType) -> int:
    """Check the shapes of all calls of a package's functions from now on; returns how many functions there are."""
    names = [one.name for one in pkgutil.iter_modules(getattr(package, "__path__", ()))]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names] or [package]
    replaced: dict[Callable[..., Any], Any] = {}
    for module in modules:
        for owner, name, function in list(_functions(module)):
            if (watched := _watched(function, owner if name == "__init__" else function)) is not None:
                replaced[function] = watched
                setattr(owner, name, watched)
    for module in (package, *modules):
        _rebind(vars(module), replaced)
    return len(replaced)


def _functions(module: ModuleType) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """The public functions of a module and the methods of its classes, each with its owner."""
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value) and not name.startswith("_"):
            yield module, name, value
        elif inspect.isclass(value):
            own = ((key, item) for key, item in vars(value).items() if inspect.isfunction(item))
            public = ("__call__", "__init__") if is_dataclass(value) else ("__call__",)
            yield from ((value, key, item) for key, item in own if key in public or not key.startswith("_"))


def _watched(function: Callable[..., Any], named_by: Any) -> Any:
    """The function with its shapes checked, None where it names none. named_by: what has the annotations."""
    try:
        hints = get_type_hints(named_by, include_extras=True)
    except NameError:  # of something that is imported for the type checker alone
        return None
    shapes = {name: shaped for name, hint in hints.items() if (shaped := _shape(hint)) is not None}
    if not shapes:
        return None
    copy = type(function)(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__annotations__ = shapes
    return jaxtyped(typechecker=beartype)(copy)


def _shape(hint: Any) -> Any:
    """jaxtyping's form of an annotation, None for one that is about no array."""
    if get_origin(hint) is Annotated and get_args(hint)[0] is mx.array:
        shape = get_args(hint)[1]
        return Int[mx.array, shape.removeprefix("int ")] if shape.startswith("int ") else Float[mx.array, shape]
    parts = [_shape(part) or (part if part is type(None) else None) for part in get_args(hint)]
    return parts[0] | None if len(parts) == 2 and type(None) in parts and parts[0] is not None else None


def _rebind(names: dict[str, Any], replaced: dict[Callable[..., Any], Any]) -> None:
    """Put the checking functions where the others are known by name, and into tables of functions."""
    for name, value in list(names.items()):
        if inspect.isfunction(value):
            names[name] = replaced.get(value, value)
        elif isinstance(value, dict) and not name.startswith("__"):
            _rebind(value, replaced)
