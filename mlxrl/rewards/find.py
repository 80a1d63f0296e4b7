"""What users wrote, by name: `module:function` or `file.py:function`; reward functions, and the like."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mlxrl.data import did_you_mean
from mlxrl.rewards.functions import Function


def resolve(spec: str, folder: str | Path | None = None) -> Function:
    """The reward function that `module:function` or `file.py:function` names.

    Args:
        folder: where files and modules are looked for before the current directory. An installed module comes first.
    Raises:
        ValueError: one line that says what is missing.
    """
    function = find(spec, folder)
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"reward {spec!r}: wanted a function, got a {type(function).__name__}")
    return function


def find(spec: str, folder: str | Path | None = None, what: str = "reward") -> Any:
    """What `module:name` or `file.py:name` names, and is called `what` where it cannot be had."""
    module, name = _split(spec, what)
    path = _path_of(module, folder, what)
    found: Any = _load(path, spec, what) if path else _import(module, spec, what)
    for part in name.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, [name for name in vars(found) if not name.startswith("_")])
            raise ValueError(f"{what} {spec!r}: {module} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


def located(spec: str, folder: str | Path | None = None, what: str = "reward") -> str:
    """`spec` as it can be found from anywhere: a file's path is made absolute."""
    module, name = _split(spec, what)
    path = _path_of(module, folder, what)
    return f"{path}:{name}" if path else spec


def _split(spec: str, what: str) -> tuple[str, str]:
    module, colon, name = spec.rpartition(":")
    if not colon or not module or not name:
        kind = "function" if what == "reward" else "Class"
        raise ValueError(f"{what} {spec!r}: wanted 'module:{kind}' or 'file.py:{kind}'")
    return module, name


def _path_of(module: str, folder: str | Path | None, what: str) -> Path | None:
    """The file that a module's name stands for, None for a module that is installed."""
    is_file = module.endswith(".py")
    installed = None if is_file else _installed(module)
    relative = Path(module if is_file else module.replace(".", "/") + ".py").expanduser()
    for base in (*((Path(folder),) if folder else ()), Path.cwd()):
        path = (base / relative).resolve()
        if path.is_file() and installed in (None, str(path)):
            return path
    if is_file:
        raise ValueError(f"{what}: no file {module!r} beside the config or in the current directory")
    return None


def _installed(module: str) -> str | None:
    """Where Python finds a module by itself."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return found.origin if found else None


def _import(module: str, spec: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        raise _unimportable(spec, error, what) from error


def _load(path: Path, spec: str, what: str) -> ModuleType:
    """The module of a file, run once; its folder is put last on the path, so that it may import its neighbours."""
    name = f"mlxrl loaded {path}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _unimportable(spec, error, what) from error
    return module


def _unimportable(spec: str, error: BaseException, what: str) -> ValueError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return ValueError(f"{what} {spec!r}: cannot be imported: {reason}")
