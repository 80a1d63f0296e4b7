"""Imports point one way, and what must answer at once loads nothing heavy."""

import ast
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mlxrl"
BASE = {"errors", "files", "checked", "settings", "plugins"}
BELOW = {
    "errors": set(),
    "files": set(),
    "checked": {"errors"},
    "settings": {"errors", "checked"},
    "plugins": {"errors"},
    "types": BASE,
    "data": {*BASE, "types"},
    "rewards": {*BASE, "types", "data"},
    "algo": {*BASE, "types"},
    "tools": {*BASE, "types"},
    "environments": {*BASE, "types", "tools"},
    "policy": {*BASE, "types"},
    "rollout": {*BASE, "types", "data", "rewards", "policy"},
    "train": {*BASE, "types", "data", "rewards", "algo", "policy", "rollout"},
    "runs": {*BASE, "types", "data", "rewards", "algo", "policy", "rollout", "train"},
    "show": {*BASE, "types", "data", "rewards", "algo", "policy", "rollout", "train"},
    "config": {*BASE, "types", "data", "rewards", "algo", "policy", "rollout", "train"},
    "cli": {*BASE, "types", "data", "rewards", "algo", "policy", "rollout", "train", "runs", "show", "config"},
    "__main__": {"cli"},
}
"""What each part of the package may import of it, itself aside. data is below rewards; siblings are apart."""

FOREIGN = {
    **{part: set() for part in ("errors", "files", "plugins", "data", "rewards")},
    "checked": {"msgspec"},
    "settings": {"msgspec"},
    "types": {"mlx.core"},
    "algo": {"mlx.core", "numpy"},
}
"""What the lowest parts may import from outside the standard library."""


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
    assert {part_of(path) for path in files()} <= set(BELOW)


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
def test_the_lowest_parts_import_little(path):
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


def test_importing_the_library_loads_no_model_library():
    code = "import mlxrl, sys; print([n for n in ('mlx_lm', 'transformers', 'rich', 'datasets') if n in sys.modules])"
    assert python("-c", code).stdout.strip() == "[]"


def test_no_name_hides_a_package():
    """A module is imported under another name, whatever functions the library has."""
    code = (
        "import mlxrl.train.loop as loop, mlxrl.rollout.engine as engine, mlxrl\n"
        "print(loop.run is mlxrl.run, mlxrl.rollout.engine is engine, mlxrl.train.loop is loop)"
    )
    assert python("-c", code).stdout.strip() == "True True True"


def test_public_names_exist_and_are_few():
    import mlxrl

    assert len(mlxrl.__all__) <= 40
    assert all(getattr(mlxrl, name) is not None for name in mlxrl.__all__)


@pytest.mark.parametrize(
    ("arguments", "code", "piece"),
    [
        (["--help"], 0, "train | eval"),
        (["--version"], 0, "mlx-lm"),
        (["train", "--help"], 0, "--dry-run"),
        (["train", "--config", "none.toml"], 2, "mlxrl: none.toml: no such file"),
        (["train", "--config", "{bad}"], 2, "unknown key 'temprature'; did you mean 'temperature'?"),
    ],
)
def test_help_and_faults_answer_in_half_a_second(tmp_path, arguments, code, piece):
    bad = tmp_path / "bad.toml"
    bad.write_text('[model]\nid="a/b"\n[data]\ntrain="a.jsonl"\n[reward]\nfunctions=[]\n[sampling]\ntemprature=1\n')
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python("-m", "mlxrl", *(word.format(bad=bad) for word in arguments))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == code
    assert piece in done.stdout + done.stderr
    assert code == 0 or done.stderr.count("\n") == 1
    # The processor's time, because the machine may have other work; loading a model library alone takes 2 s of it.
    assert (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime) < 0.5


def test_without_a_backend_one_line_names_the_extras(tmp_path):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')\n")
    done = python("-m", "mlxrl", "train", "--config", "x.toml", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert 'pip install "mlxrl[cpu]"' in done.stderr
    assert "libmlx.so" in done.stderr
