"""From a table [algorithm] to an algorithm and back, and the register of the recipes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from mlxrl import protocols
from mlxrl.algo import reduce
from mlxrl.algo.algorithm import TERMS, Algorithm, Term
from mlxrl.algo.conventions import CONVENTIONS, MOVED
from mlxrl.algo.credit import GiGPO, GroupBaseline, GroupRelative
from mlxrl.checked import SettingError
from mlxrl.errors import UserError, brief, did_you_mean, exception_line, place_of
from mlxrl.names import foreign
from mlxrl.plugins import PluginError, find

P = ParamSpec("P")
RECIPES: dict[str, Callable[..., Algorithm]] = {}
_PARTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {}
"""The credit and the policy loss of every recipe, and its arguments with their defaults."""


def recipe(credit: Any, policy_loss: Any) -> Callable[[Callable[P, None]], Callable[P, Algorithm]]:
    """Make a declaration, a function of keywords without a body, a recipe of RECIPES.

    An argument is the setting of that name of the credit or of the policy loss, the reduction, the terms, or `teacher`,
    one more term. A fault in them is one line that names the recipe and the argument.
    """

    def decorate(function: Callable[P, None]) -> Callable[P, Algorithm]:
        name, parameters = function.__name__, inspect.signature(function).parameters
        _PARTS[name] = credit, policy_loss, {key: parameter.default for key, parameter in parameters.items()}
        function.__annotations__["return"] = Algorithm

        @wraps(function)
        def make(*unnamed: P.args, **given: P.kwargs) -> Algorithm:
            if unnamed:
                raise SettingError(name, f"wanted keywords, as clip=..., got {brief(unnamed[0])}")
            return _made(name, given, given)

        RECIPES[name] = make
        return make

    return decorate


def _made(name: str, arguments: Mapping[str, Any], given: Collection[str]) -> Algorithm:
    """A recipe's algorithm. given: the arguments that are refused where they have no effect; a convention's are not."""
    credit, policy_loss, defaults = _PARTS[name]
    for key in arguments:
        if key not in defaults:
            raise SettingError(name, _unknown(key, defaults))
    if isinstance(one := arguments.get("terms"), Term):
        raise SettingError(name, "terms", f"wanted a list of terms, got {type(one).__name__}")
    chosen = {**defaults, **arguments}
    parts = [{key: chosen[key] for key in _fields(part) if key in chosen} for part in (credit, policy_loss)]
    terms = (*chosen["terms"], chosen["teacher"]) if "teacher" in chosen else chosen["terms"]
    # In the order of TERMS, one's own after them: the order in which they were given changes no sum.
    order = {kind: number for number, kind in enumerate(TERMS.values())}
    terms = tuple(sorted(terms, key=lambda term: order.get(type(term), len(order))))
    try:
        reduction = reduce.named(chosen["reduction"])
        algorithm = Algorithm(name, replace(credit, **parts[0]), replace(policy_loss, **parts[1]), reduction, terms)
    except SettingError as error:
        raise SettingError(name, *error.parts[1:]) if error.parts[0] == "algorithm" else error from None
    dead = _dead(algorithm)
    dead |= {term.table: dead["clip"] for term in algorithm.terms if "clip" in dead and _overrides(term, "factor")}
    for key in (*given, *(term.table for term in algorithm.terms)):
        if key in dead:
            raise SettingError(name, key, f"has no effect, because {dead[key]}; leave it out")
    return algorithm


def _dead(algorithm: Algorithm) -> dict[str, str]:
    """The arguments of its recipe that have no effect on an algorithm, and why."""
    credit, dead = algorithm.credit, dict[str, str]()
    if isinstance(credit, GiGPO) and not credit.omega:
        dead |= dict.fromkeys(("gamma", "similarity"), "omega is 0")
    if isinstance(credit, GiGPO | GroupRelative) and credit.scale in ("none", "raw"):
        dead["eps"] = f"scale is '{credit.scale}'"
    if isinstance(credit, GroupBaseline) and not credit.reward:
        dead |= dict.fromkeys(("scale", "eps", "whiten", "mask_truncated"), "reward is 0")
        if not any(_overrides(term, "advantage") for term in algorithm.terms):
            dead |= dict.fromkeys(_fields(algorithm.policy_loss), "reward is 0 and no term adds to the advantages")
    if algorithm.turns is not None:
        dead |= {term.table: "nothing is sampled" for term in algorithm.terms if _of_samples(term)}
    return dead


def _of_samples(term: Term) -> bool:
    """Whether a term is about tokens as they were sampled."""
    kept = term.comparison is not None and term.comparison.support == "student"
    return kept or _overrides(term, "advantage") or _overrides(term, "factor")


def _overrides(term: Term, method: str) -> bool:
    return getattr(type(term), method) is not getattr(Term, method)


def _fields(part: Any) -> dict[str, Any]:
    """The settings of a part of an algorithm or of a kind of term, none of a plain function."""
    return {field.name: getattr(part, field.name) for field in fields(part)} if is_dataclass(part) else {}


def build(table: Mapping[str, Any], folder: str | Path | None = None) -> protocols.Algorithm:
    """The algorithm of a table [algorithm]: a name, the arguments of its recipe, and a table for each term.

    `{"name": "grpo", "clip": [0.2, 0.28], "kl": {"coefficient": 0.04}}`. `convention` names a library whose values are
    the defaults. The name may be `file.py:make`, a function of one's own that takes the other keys, terms as `terms`,
    and returns an algorithm; such files are looked for in `folder`, then in the current directory.

    Raises:
        UserError: a key or a value is wrong, or has no effect.
    """
    given = {key: _frozen(value) for key, value in table.items()}
    name = str(given.pop("name", "grpo"))
    if ":" in name:
        return _own(name, given, folder)
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or f"; there are {', '.join(RECIPES)}, or 'file.py:function'"
        raise SettingError("algorithm", "name", f"unknown algorithm {name!r}{hint}")
    known = {family: recipes[name] for family, recipes in CONVENTIONS.items() if name in recipes}
    convention = given.pop("convention", None)
    if convention is not None and convention not in known:
        wanted = f"one of {', '.join(sorted(known))}" if known else "none"
        raise SettingError("algorithm", name, "convention", f"wanted {wanted}, got {brief(convention)}")
    usual, defaults = {} if convention is None else known[convention], _PARTS[name][2]
    _refuse_keys(name, given, defaults)
    arguments = _with_terms(_with_convention(given, usual, defaults), defaults)
    try:
        return _made(name, arguments, given)
    except SettingError as error:
        raise error if error.parts[0].startswith("algorithm") else error.within("algorithm") from None


def _own(name: str, given: Mapping[str, Any], folder: str | Path | None) -> protocols.Algorithm:
    """The algorithm that a function of the user's returns."""
    try:
        function = find(name, folder)
    except PluginError as error:
        raise error.within("algorithm", "name") from None
    if not callable(function):
        raise PluginError("algorithm", name, f"wanted a function, got {brief(function)}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise PluginError("algorithm", name, "its parameters cannot be read; wrap it in a def") from None
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    _refuse_keys(name, given, signature.parameters, anything)
    arguments = _with_terms(given, signature.parameters)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise PluginError("algorithm", name, str(error)) from None
    try:
        made = function(**arguments)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # user code may raise anything
        why = f"raised {exception_line(error)}{place_of(error)}"
        raise PluginError("algorithm", name, why) from error
    if not isinstance(made, protocols.Algorithm):
        raise PluginError("algorithm", name, f"wanted a function that returns an algorithm, got {brief(made)}")
    return made


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _refuse_keys(name: str, given: Mapping[str, Any], parameters: Collection[str], anything: bool = False) -> None:
    """SettingError for a key that neither the function nor a term has, and for a term that is no table."""
    known = [key for key in parameters if key not in ("terms", "teacher")]
    for key, value in given.items():
        if key in MOVED and value is not None and not isinstance(value, Mapping) and ":" not in name:
            raise SettingError("algorithm", _unknown(key, ()))
        if key in TERMS and key not in known:
            if not isinstance(value, Mapping):
                raise SettingError(f"algorithm.{key}", f"wanted a table, got {brief(value)}")
            names = _fields(TERMS[key])
            for inner in value:
                if inner not in names:
                    raise SettingError(f"algorithm.{key}", _unknown(inner, names, known))
        elif key not in known and not anything:
            raise SettingError("algorithm", name, _unknown(key, [*known, *TERMS]))


def _unknown(key: str, known: Collection[str], parameters: Collection[str] = ()) -> str:
    """The message for a key that is not known here: where it is known, or what is close to it."""
    if key in MOVED:
        return f"{key!r} is now {MOVED[key]}"
    homes = ["algorithm"] if key in parameters else []
    homes += [kind.table for kind in TERMS.values() if key in _fields(kind)]
    if there := foreign(key):
        return f"unknown key {key!r}{there}"
    near = f"; did you mean '{homes[0]}.{key}'?" if homes else did_you_mean(key, known)
    return f"unknown key {key!r}{near or '; there are ' + ', '.join(known)}"


def _with_convention(given: Mapping[str, Any], usual: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The given keys, and a convention's for the others; its tables hold for what is there, given or by default."""
    there = {getattr(value, "table", "").removeprefix("algorithm.") for value in defaults.values()}
    if any("teacher" in TERMS[key].needs for key in given if key in TERMS):
        there.discard("teacher_advantage")
    out = dict(given)
    for key, value in usual.items():
        if not isinstance(value, Mapping):
            out.setdefault(key, value)
        elif isinstance(own := given.get(key, {} if key in there else None), Mapping):
            out[key] = {**value, **own}
    return out


def _with_terms(given: Mapping[str, Any], parameters: Collection[str]) -> dict[str, Any]:
    """The keys as arguments of a function: tables of terms as its `terms`, that of a teacher as its `teacher`."""
    arguments = {key: value for key, value in given.items() if key in parameters or key not in TERMS}
    terms = [TERMS[key](**value) for key, value in given.items() if key not in arguments]
    teachers = [term for term in terms if "teacher" in term.needs]
    if "teacher" in parameters and teachers:
        arguments["teacher"] = teachers[0]
        terms.remove(teachers[0])
    return {**arguments, "terms": terms} if terms else arguments


def arguments_of(algorithm: protocols.Algorithm) -> dict[str, Any]:
    """The table that makes an algorithm of a recipe: its name, every argument that has an effect, its terms' tables.

    Of another algorithm it is the name.
    """
    if not isinstance(algorithm, Algorithm) or algorithm.name not in RECIPES:
        return {"name": algorithm.name}
    values = {**_fields(algorithm.credit), **_fields(algorithm.policy_loss)}
    values["reduction"] = reduce.name_of(algorithm.reduction)
    dead = _dead(algorithm)
    found = {name: _plain(values[name]) for name in _PARTS[algorithm.name][2] if name in values and name not in dead}
    tables = {term.table.removeprefix("algorithm."): _plain(term) for term in algorithm.terms if term.table}
    return {"name": algorithm.name, **found, **tables}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {name: _plain(item) for name, item in _fields(value).items()}
    return sorted(value) if isinstance(value, frozenset) else value
