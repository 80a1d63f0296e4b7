"""The README runs as it stands, top to bottom, and its list of keys is made of the declarations.

python tests/test_readme.py    writes the list of keys anew
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlxrl.config import keys

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BETWEEN = re.compile(r"(?<=<!-- keys -->\n).*?(?=<!-- /keys -->)", re.DOTALL)
INSTALL = "python3 -m venv"


def keys_table() -> str:
    """Every key as a line of a table, in the order of the declarations."""
    lines = ["| key | default | what it is |", "|---|---|---|"]
    for key in keys():
        default = f"`{key.default}`" if key.default else ""
        lines.append(f"| `{key.name}` | {default} | {key.sentence} |")
    return "\n".join(lines) + "\n"


def blocks() -> list[tuple[str, str]]:
    """The kind and the text of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_list_of_keys_is_that_of_the_declarations():
    found = BETWEEN.search(README.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == keys_table(), "python tests/test_readme.py writes it anew"


def test_the_clean_machine_installs_and_tests_as_the_readme_says():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (install,) = [text for kind, text in blocks() if kind == "sh" and text.startswith(INSTALL)]
    assert 'pip install --quiet -e ".[dev]"' in script
    assert 'pip install -e ".[dev]"' in install
    for command in re.findall(r"`(python -m pytest[^`]*)`", README.read_text(encoding="utf-8")):
        assert f".venv/bin/{command}" in script


@pytest.mark.slow
def test_every_block_runs_as_it_stands(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    there = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    session, ran = "", 0
    for kind, text in blocks():
        name = re.match(r"# (\S+\.(?:py|toml))\n", text)
        if name:
            (tmp_path / name[1]).write_text(text)
        elif kind == "python":
            session += text
            run(tmp_path, there, [sys.executable, "-c", session])
        elif kind == "sh" and not text.startswith(INSTALL):
            run(tmp_path, there, ["bash", "-ec", text])
        ran += 1
    assert ran > 12
    assert (tmp_path / "runs/arithmetic/adapters/adapters.safetensors").is_file()
    assert (tmp_path / "runs/loop/adapters/adapters.safetensors").is_file()


def run(folder: Path, environment: dict[str, str], command: list[str]) -> None:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


if __name__ == "__main__":
    README.write_text(BETWEEN.sub(lambda _: keys_table(), README.read_text(encoding="utf-8")), encoding="utf-8")
