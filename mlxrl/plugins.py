"""User code by name, `module:name` or `file.py:name`: rewards, environments, algorithms, sinks, tools."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from mlxrl.errors import UserError, did_you_mean, exception_line


class PluginError(UserError):
    """User code that cannot be found, imported or used."""


def find(name: str, folder: str | Path | None = None) -> Any:
    """What `module:name` or `file.py:name` names.

    A file is a module by its own name, loaded once, whose folder is on the path: so its other users, files of the same
    folder and the processes that it starts import the same module. An installed module comes before a file of its name.

    Args:
        folder: where files and modules are looked for before the current directory.
    Raises:
        PluginError: one line that says what is missing.
    """
    module, attribute = _split(name)
    path = _path_of(module, folder)
    try:
        found = _loaded(path) if path else importlib.import_module(module)
    except PluginError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise anything while it is imported
        raise PluginError(repr(name), f"cannot be imported: {exception_line(error)}") from error
    try:
        return attrgetter(attribute)(found)
    except AttributeError:
        hint = did_you_mean(attribute, [one for one in vars(found) if not one.startswith("_")])
        raise PluginError(repr(name), f"{module} has no {attribute!r}{hint}") from None


def located(name: str, folder: str | Path | None = None) -> str:
    """A name as it can be found from anywhere: a file's path is made absolute."""
    module, attribute = _split(name)
    path = _path_of(module, folder)
    return f"{path}:{attribute}" if path else name


def check_keywords(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """PluginError unless a function can be called with these keywords, and nothing else."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # it cannot be known
    parameters = signature.parameters.values()
    named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes = f"; it takes {', '.join(named) or 'none'}"
    unknown = [name for name in arguments if name not in named]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        hint = did_you_mean(unknown[0], named) or takes
        raise PluginError("arguments", f"got an unexpected keyword argument {unknown[0]!r}{hint}")
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise PluginError("arguments", f"{error}{takes}") from None


class Copying(partial[Any]):
    """A function with keywords, of which each call gets copies: what it does to them reaches no other."""

    def __call__(self, /) -> Any:
        """Call it."""
        return self.func(**deepcopy(self.keywords))


def _split(name: str) -> tuple[str, str]:
    module, colon, attribute = name.rpartition(":")
    if not colon or not module or not attribute:
        raise PluginError(repr(name), "wanted 'module:name' or 'file.py:name'")
    return module, attribute


def _path_of(module: str, folder: str | Path | None) -> Path | None:
    """The file that a module's name stands for, None for a module that is installed."""
    is_file = module.endswith(".py")
    installed = None if is_file else _installed(module)
    if installed and "." in module:
        return None  # as a part of its package, whose modules it may import
    relative = os.path.expanduser(module if is_file else module.replace(".", "/") + ".py")
    for base in (*((Path(folder),) if folder else ()), Path.cwd()):
        path = _file(base / relative)
        if path is not None and installed in (None, path):
            return path
    if is_file:
        raise PluginError(f"no file {module!r} beside the config or in the current directory")
    return None


def _file(path: Path) -> Path | None:
    """The file that a path leads to; None for no file, and for a path that cannot be: too long, a loop, with a NUL."""
    try:
        return found if (found := path.resolve()).is_file() else None
    except (OSError, RuntimeError, ValueError):
        return None


def _installed(module: str) -> Path | None:
    """The file that Python finds for a module by itself."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the package that it is in is imported on the way
        raise PluginError(repr(module), f"cannot be imported: {exception_line(error)}") from error
    return Path(found.origin).resolve() if found and found.origin else None


def _loaded(path: Path) -> ModuleType:
    """The module of a file, by its own name where no other module has that name."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    importlib.invalidate_caches()  # the file may be younger than what Python remembers of its folder
    return importlib.import_module(path.stem) if _installed(path.stem) == path else _under_another_name(path)


def _under_another_name(path: Path) -> ModuleType:
    """The module of a file whose name another module has; processes that it starts anew cannot import it."""
    name = f"{path.stem.replace('.', '_')}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[name]
        raise
    return made
