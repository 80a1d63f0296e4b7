"""Frozen values whose fields are checked against their declared types and bounds, from TOML and from Python alike.

A field is one line, `rank: Annotated[Count, says("of the adapters")] = 8`; msgspec reads the types and bounds. A fault
is a `UserError` that names the value's table and key: `rollout: group_size: wanted at least 1, got 0`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from mlxrl.errors import UserError, brief, did_you_mean
from mlxrl.names import foreign

P = ParamSpec("P")
T = TypeVar("T")
LARGEST = 2**31 - 1
SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Of float32, in which everything is computed."""


class SettingError(UserError):
    """A setting that is unknown, missing, of the wrong type, out of bounds, or without effect."""


def says(sentence: str) -> Meta:
    """What a setting means, for `--help`, the documentation and the list of all keys."""
    return Meta(description=sentence)


def at_most(count: int) -> Meta:
    """The bound of a count above which it asks for more than a machine has; only a message about it names it."""
    return Meta(extra={"most": count})


def because(reason: str) -> Meta:
    """Why the bounds of a setting are what they are; it ends the message of a value beyond them."""
    return Meta(extra={"why": reason})


Count = Annotated[int, Meta(ge=1, le=LARGEST)]
Natural = Annotated[int, Meta(ge=0, le=LARGEST)]
Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
Text = Annotated[str, Meta(min_length=1)]
Characters = Annotated[str, Meta(min_length=1, extra={"blank": True})]
Unbounded = Meta(extra={"infinite": True})
AboveOne = Annotated[float, Meta(gt=1), Unbounded]
Interval = Annotated[
    tuple[float | None, float | None], Meta(extra={"ordered": True}), because("the lower bound stands first")
]
"""Two bounds, either of which may be missing."""


CHECKED: list[Any] = []
"""Every class of settings."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def checked(table: str) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass of keywords that checks its fields. `table` is its name in TOML.

    A method `check(self)` may judge what needs two fields; it raises `SettingError(key, message)`.
    """

    def decorate(cls: type[T]) -> type[T]:
        own: Any = cls
        own.table = table
        own.__post_init__ = _post_init
        own.__annotations__ = {"table": ClassVar[str], **inspect.get_annotations(own)}
        made: Any = dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(own)
        made.__init__ = _known_keywords(made, made.__init__)
        CHECKED.append(made)
        return made

    return decorate


def _post_init(self: Any) -> None:
    for name, hint in hints_of(type(self)).items():
        object.__setattr__(self, name, checked_value(type(self).table, name, hint, getattr(self, name)))
    if (check := getattr(self, "check", None)) is not None:
        try:
            check()
        except SettingError as error:
            raise error.within(type(self).table) from None


def checked_value(table: str, name: str, hint: Any, value: Any) -> Any:
    """`converted`, whose faults name the table and the key."""
    choices = (hint, *get_args(hint))
    nested = next((choice for choice in choices if hasattr(choice, "table")), None)
    if nested is not None:
        return None if value is None and types.NoneType in choices else _nested(nested, table, name, value)
    try:
        return converted(hint, value)
    except SettingError as error:
        raise error.within(table, name) from None


def _nested(cls: Any, table: str, name: str, value: Any) -> Any:
    """A table as the checked class that it is, whose faults name it themselves."""
    if isinstance(value, Mapping):
        return cls(**value)
    if not isinstance(value, cls):
        raise SettingError(table, name, f"wanted a table, got {brief(value)}")
    return value


def _known_keywords(cls: Any, initialise: Callable[..., None]) -> Callable[..., None]:
    fields = {field.name: field for field in dataclasses.fields(cls)}

    @wraps(initialise)
    def __init__(self: Any, *unnamed: Any, **given: Any) -> None:
        if unnamed:
            raise SettingError(cls.table, f"wanted keywords, as {next(iter(fields))}=..., got {brief(unnamed[0])}")
        refuse_unknown(cls.table, given, fields)
        for name, field in fields.items():
            if name not in given and field.default is field.default_factory is dataclasses.MISSING:
                raise SettingError(cls.table, f"missing key {name!r}")
        initialise(self, **given)

    return __init__


def refuse_unknown(table: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """SettingError for a key that is none of those known: with what it is called here, or where it belongs."""
    for name in given:
        if name not in known:
            home = next((f"; wanted {cls.__name__}({name}=...)" for cls in CHECKED if name in hints_of(cls)), "")
            hint = foreign(name) or home or did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise SettingError(table, f"unknown key {name!r}{hint}")


def keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function refuse in one line a keyword that it has not, and a value of another class than it wants."""
    signature, name = inspect.signature(function), function.__name__

    @wraps(function)
    def called(*arguments: P.args, **given: P.kwargs) -> T:
        refuse_unknown(name, given, signature.parameters)
        try:
            bound = signature.bind(*arguments, **given)
        except TypeError as error:
            raise SettingError(name, str(error)) from None
        for key, value in bound.arguments.items():
            if (classes := _classes(hints_of(function)[key])) and not isinstance(value, classes):
                raise SettingError(name, key, f"wanted {' or '.join(map(_class_name, classes))}, got {brief(value)}")
        return function(*arguments, **given)

    return called


def _class_name(cls: type) -> str:
    if cls is types.NoneType or hasattr(cls, "table"):
        return "None" if cls is types.NoneType else f"{cls.__name__}(...)"
    outside = not cls.__module__.startswith(("mlxrl", "builtins"))
    return f"{cls.__module__}.{cls.__name__}" if outside else cls.__name__


def _classes(hint: Any) -> tuple[type, ...]:
    """The classes that values of a type are of; none where it says more, as of numbers and lists."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    plain = all(isinstance(part, type) and get_origin(part) is None for part in parts)
    return () if not plain or {int, float, bool} & set(parts) else parts


@cache
def hints_of(of: Any) -> dict[str, Any]:
    """The types of a class's fields or of a function's arguments, with their bounds."""
    hints = get_type_hints(inspect.unwrap(of) if inspect.isfunction(of) else of, include_extras=True)
    hints.pop("return", None)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar and hint is not ClassVar}


def sentence_of(hint: Any) -> str:
    """What a setting's declaration says it means."""
    return " ".join(meta.description for meta in _metas(hint) if meta.description)


def converted(hint: Any, value: Any) -> Any:
    """A value as the type that a hint names, an int as a float and a list as a tuple where those are wanted.

    Raises:
        SettingError: it is none, or out of its bounds.
    """
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()  # a number of numpy's or MLX's
    try:
        made = msgspec.convert(value, hint)
    except (msgspec.ValidationError, OverflowError):
        made, right = None, False
    else:
        right = _filled(hint, made) and (_extra(hint, "infinite") or _single(made))
        right = right and (not _extra(hint, "ordered") or _in_order(made))
    most: Any = _extra(hint, "most")
    if right and most is not None and made is not None and made > most:
        raise SettingError(f"wanted at most {most:,}, got {made:,}")
    if right:
        return made
    why = "a float32 is between 1.2e-38 and 3.4e38 in size" if _beyond(made) else _extra(hint, "why")
    if isinstance(value, int) and value > LARGEST and any(meta.le == LARGEST for meta in _metas(hint, inside=True)):
        why = f"at most {LARGEST:,}"
    near = did_you_mean(value, _choices(hint)) if isinstance(value, str) else ""
    raise SettingError(f"wanted {wanted(hint)}, got {brief(value)}{near or (f'; {why}' if why else '')}")


def _filled(hint: Any, value: Any) -> bool:
    """Whether texts that may not be empty are more than white space, where that is not enough."""
    if isinstance(value, str):
        metas = _metas(hint, inside=True)
        return bool(value.strip()) or not any(meta.min_length and not meta.extra for meta in metas)
    return all(_filled(hint, item) for item in value) if isinstance(value, tuple) else True


def _single(value: Any) -> bool:
    """Whether the numbers of a value are finite as float32, and not 0 only there."""
    if isinstance(value, float):
        return value == 0.0 or SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT
    return all(map(_single, value)) if isinstance(value, tuple | list) else True


def _beyond(value: Any) -> bool:
    """Whether a value is a finite number of Python's that is none of float32."""
    return isinstance(value, float) and math.isfinite(value) and not _single(value)


def _in_order(value: Any) -> bool:
    return value is None or None in value or value[0] < value[1]


def _extra(hint: Any, name: str) -> Any:
    """What `because`, `Unbounded` or `Interval` say of a setting, None for nothing."""
    return next((meta.extra[name] for meta in _metas(hint, inside=True) if meta.extra and name in meta.extra), None)


def _metas(hint: Any, *, inside: bool = False) -> list[Meta]:
    """What stands at a type besides it; inside: at its parts too."""
    found = [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Meta)]
    return found + [meta for part in get_args(hint) for meta in _metas(part, inside=True)] if inside else found


def _choices(hint: Any) -> list[Any]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for part in get_args(hint) for choice in _choices(part)]


_NAMES: dict[Any, str] = {
    Any: "a name",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
}


def wanted(hint: Any) -> str:
    """A type with its bounds, in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _bounded(arguments[0], _metas(hint)) or wanted(arguments[0])
    if origin is Literal:
        return f"one of {', '.join(map(brief, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(wanted(part) for part in arguments if part is not types.NoneType))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a table" if arguments[1] is Any else f"a table, each {wanted(arguments[1])}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return _listed(arguments)
    return _NAMES.get(hint) or getattr(hint, "__name__", str(hint))


def _listed(arguments: Sequence[Any]) -> str:
    fixed = [wanted(part) for part in arguments if part is not Ellipsis]
    parts = f"each {fixed[0]}" if len(set(fixed)) == 1 else ", then ".join(fixed)
    return f"a list{f' of {len(fixed)}' if len(fixed) > 1 else ''}, {parts}"


def _bounded(kind: Any, metas: Sequence[Meta]) -> str:
    """The bounds of a number or of a text's length."""
    bounds = {name: getattr(meta, name) for meta in metas for name in ("ge", "gt", "le", "lt", "min_length")
              if getattr(meta, name) is not None}  # fmt: skip
    if "min_length" in bounds:
        return "a text that is not empty"
    whole = "a whole number of " if kind is int else ""
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    said = [f"{words[name]} {bound:.10g}" for name, bound in bounds.items() if bound != LARGEST]
    return whole + " and ".join(said) if said else ""
