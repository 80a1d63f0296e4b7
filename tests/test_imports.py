"""Imports point one way, and what must answer at once loads nothing heavy."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mlxrl"
BASE = {"errors", "files", "names", "checked", "settings", "tables", "plugins", "store"}
TYPES = {*BASE, "types", "protocols"}
LIBRARY = {*BASE, "awaiting", "types", "protocols", "messages", "data", "rewards", "algo", "policy", "rollout", "train"}
BELOW = {
    "errors": set(),
    "files": set(),
    "text": set(),
    "names": {"errors"},
    "store": {"errors", "files"},
    "checked": {"errors", "names"},
    "settings": {"errors", "checked"},
    "tables": {"errors", "checked", "settings"},
    "plugins": {"errors"},
    "awaiting": set(),
    "toml": {"errors"},
    "config": {*BASE, "toml"},
    "types": BASE,
    "protocols": {*BASE, "types"},
    "messages": {*BASE, "types"},
    "data": {*BASE, "types", "messages"},
    "rewards": {*BASE, "awaiting", "types", "data"},
    "algo": TYPES,
    "tools": {*TYPES, "awaiting", "messages"},
    "policy": TYPES,
    "rollout": {*TYPES, "awaiting", "messages", "data", "rewards", "policy"},
    "train": LIBRARY - {"train"},
    "runs": {*LIBRARY, "toml", "config", "text"},
    "console": {*LIBRARY, "text", "runs"},
    "cli": {*LIBRARY, "toml", "config", "text", "runs", "console"},
    "__main__": {"cli"},
}
"""What each part of the package may import of it, itself aside. data is below rewards; siblings are apart."""

FOREIGN = {
    **{
        part: set()
        for part in ("errors", "files", "text", "names", "store", "toml", "plugins", "messages", "data", "rewards")
    },
    "checked": {"msgspec"},
    "settings": {"msgspec"},
    "tables": {"msgspec"},
    "config": {"tomli_w"},
    "types": {"mlx.core"},
    "protocols": {"mlx.core"},
    "algo": {"mlx.core", "numpy"},
    "console": {"rich"},
}
"""What these parts may import from outside the standard library."""


def imports(path):
    """Dotted names that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_part_of_the_package_has_its_place():
    assert {part_of(path) for path in files()} == set(BELOW)


def test_the_directions_have_no_circle():
    order = []
    while left := [part for part in BELOW if part not in order]:
        free = [part for part in left if BELOW[part] <= set(order)]
        assert free, f"in a circle: {left}"
        order += free


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    part = part_of(path)
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "mlxrl" and rest != ["__version__"]:
            assert rest[0] in BELOW[part] | {part}, f"{part} imports {name}"


@pytest.mark.parametrize(
    "path", [p for p in files() if part_of(p) in FOREIGN], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_few_parts_import_other_packages(path):
    for name in imports(path):
        top = name.split(".")[0]
        allowed = top == "mlxrl" or top in sys.stdlib_module_names
        allowed |= any(f"{name}.".startswith(f"{foreign}.") for foreign in FOREIGN[part_of(path)])
        assert allowed, f"{part_of(path)} imports {name}"


def test_the_rule_finds_what_it_forbids(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from mlxrl.cli.main import main\n    import mlx_lm.utils\n")
    assert list(imports(bad)) == ["mlxrl.cli.main.main", "mlx_lm.utils"]


def python(*arguments, **variables):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )


HEAVY = {"mlx_lm", "transformers", "tokenizers", "huggingface_hub", "datasets", "rich"}


def loaded(*arguments):
    """What a command prints and returns, and the modules that Python loads for it, its own among them."""
    done = python("-X", "importtime", *arguments)
    lines = done.stderr.splitlines()
    names = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    printed = [line for line in lines if not line.startswith("import time:")]
    return done.returncode, done.stdout + "\n".join(printed), names


def packages(names):
    """The packages of modules that are neither the standard library's nor this one's; `copy` looks for Jython's org."""
    return {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "mlxrl", "org"}


def test_importing_the_library_loads_no_model_library():
    code, _, names = loaded("-c", "import mlxrl; mlxrl.Train, mlxrl.grpo, mlxrl.tasks, mlxrl.score")
    assert code == 0
    assert {"mlx", "numpy", "msgspec"} <= packages(names)
    assert not packages(names) & HEAVY


def test_no_name_hides_a_package():
    """A module is imported under another name, whatever functions the library has."""
    code = (
        "import mlxrl.train.loop as loop, mlxrl.rollout.engine as engine, mlxrl\n"
        "print(loop.run is mlxrl.run, mlxrl.rollout.engine is engine, mlxrl.train.loop is loop)"
    )
    assert python("-c", code).stdout.strip() == "True True True"


def test_public_names_exist_and_are_few():
    import mlxrl

    assert mlxrl.__all__ == sorted(mlxrl.__all__)
    assert len(set(mlxrl.__all__) - set(mlxrl.algo.__all__)) <= 40  # besides the recipes and their terms
    assert all(getattr(mlxrl, name) is not None for name in mlxrl.__all__)


NOTHING = set()
CONFIG = {"msgspec", "tomli_w", "typing_extensions"}
"""What reads and checks a config; msgspec imports typing_extensions where that is installed."""


@pytest.mark.parametrize(
    ("arguments", "code", "piece", "allowed", "most"),
    [
        (["--help"], 0, "evaluate on a config", NOTHING, 150),
        (["--version"], 0, "mlx-lm", NOTHING, 220),
        (["train", "--help"], 0, "sampling.top_p = 1.0", CONFIG, 220),
        (["train", "--dry"], 2, "--config", NOTHING, 150),
        (["train", "--config", "none.toml"], 2, "mlxrl: none.toml: no such file", CONFIG, 220),
        (["train", "--config", "{bad}"], 2, "unknown key 'temprature'; did you mean 'temperature'?", CONFIG, 220),
        (["eval", "--config", "{bad}"], 2, "unknown key 'temprature'; did you mean 'temperature'?", CONFIG, 220),
        (
            ["train", "--config", "examples/arithmetic.toml", "algorithm.name=grpoo"],
            2, "unknown algorithm 'grpoo'; did you mean 'grpo'?", {*CONFIG, "mlx", "numpy"}, 400,
        ),
    ],
)  # fmt: skip
def test_help_and_faults_load_little(tmp_path, arguments, code, piece, allowed, most):
    """Packages and modules are counted in place of seconds: these take a tenth of a second, a model library takes two.

    `most` bounds the modules, those that Python itself starts with among them.
    """
    bad = tmp_path / "bad.toml"
    bad.write_text('[model]\nid="a/b"\n[data]\ntrain="a.jsonl"\n[reward]\nfunctions=[]\n[sampling]\ntemprature=1\n')
    returned, printed, names = loaded("-m", "mlxrl", *(word.format(bad=bad) for word in arguments))
    assert returned == code
    assert piece in printed
    assert code == 0 or len(printed.splitlines()) == 1
    assert packages(names) - STARTED <= allowed
    assert len(names) <= most


STARTED = packages(loaded("-c", "pass")[2])
"""What the environment's own hooks load whenever Python starts."""


def test_without_a_backend_one_line_names_the_extras(tmp_path):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')\n")
    done = python("-m", "mlxrl", "train", "--config", "examples/arithmetic.toml", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert 'pip install "mlxrl[cpu]"' in done.stderr
    assert "libmlx.so" in done.stderr
