"""User code by name: where it is found, and that a file is one module, which processes find too."""

import os
import subprocess
import sys

import pytest

from helpers import EXAMPLE, ROOT
from mlxrl import rewards
from mlxrl.files import read_lines
from mlxrl.plugins import PluginError, find, located


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder beside the current directory, in which a test's modules are forgotten when it ends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    (tmp_path / "conf").mkdir()
    yield tmp_path / "conf"
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_files_are_found_beside_the_config_and_modules_where_python_finds_them(folder):
    (folder / "fair_grader.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport fair_neighbour\n"
        "@dataclass\nclass Box:\n    x: int\n    def open(self): ...\n"
        "def fair(completions): return fair_neighbour.value\n"
    )
    (folder / "fair_neighbour.py").write_text("value = 7.0\n")
    for name in ("fair_grader.py:fair", "fair_grader:fair"):
        assert located(name, folder) == f"{folder}/fair_grader.py:fair"
        assert find(name, folder)([""]) == 7.0
    assert find("conf/fair_grader.py:fair") is find(f"{folder}/fair_grader.py:fair") is find("fair_grader:fair", folder)
    assert find("fair_grader.py:Box.open", folder).__qualname__ == "Box.open"
    assert located("mlxrl.rewards:contains", folder) == "mlxrl.rewards:contains"
    assert find("mlxrl.rewards:contains") is rewards.contains


def test_what_cannot_be_found_is_said_in_a_line(folder):
    (folder / "few.py").write_text("def fair(): ...\n")
    for name, message in {
        "few.py:fare": "'few.py:fare': few.py has no 'fare'; did you mean 'fair'?",
        "few.py:fair.deep": "'few.py:fair.deep': few.py has no 'fair.deep'",
        "fewer.py:fair": "no file 'fewer.py' beside the config or in the current directory",
        "no_such_module:fair": "'no_such_module:fair': cannot be imported: ModuleNotFoundError: No module named 'no_s",
        "no.such.module:fair": "'no.such.module:fair': cannot be imported: ModuleNotFoundError: No module named 'no'",
        "fair": "'fair': wanted 'module:name' or 'file.py:name'",
        "few.py:": "'few.py:': wanted 'module:name' or 'file.py:name'",
    }.items():
        with pytest.raises(PluginError) as found:
            find(name, folder)
        assert str(found.value).startswith(message)
        assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def f(:", "SyntaxError: invalid syntax (broken.py, line 1)"),
        ("class Mute(Exception):\n    def __str__(self): 1 / 0\nraise Mute", "Mute"),
        ("raise KeyError('a\\nb')", "KeyError: 'a\\nb'"),
    ],
)
def test_a_file_that_fails_to_run_says_why_and_may_be_corrected(folder, text, reason):
    (folder / "broken.py").write_text(text + "\n")
    for name in ("broken.py:f", "broken:f"):
        with pytest.raises(PluginError) as found:
            find(name, folder)
        assert str(found.value) == f"{name!r}: cannot be imported: {reason}"
    (folder / "broken.py").write_text("def f(): return 'as it is now, and longer than before'\n")
    assert find("broken.py:f", folder)().startswith("as it is now")


def test_a_module_of_a_package_that_python_finds_is_part_of_it(folder, monkeypatch):
    package = folder / "grading" / "sums"
    package.mkdir(parents=True)
    for place in (package, package.parent):
        (place / "__init__.py").write_text("")
    (package / "graders.py").write_text("from ..shared import value\n")
    (package / "lone_grader.py").write_text("value = 6\n")
    (package.parent / "shared.py").write_text("value = 5\n")
    assert located("grading.sums.lone_grader:value", folder) == f"{package}/lone_grader.py:value"
    assert find("grading.sums.lone_grader:value", folder) == find("grading/sums/lone_grader.py:value", folder) == 6
    monkeypatch.syspath_prepend(str(folder))
    assert located("grading.sums.graders:value", folder) == "grading.sums.graders:value"
    assert find("grading.sums.graders:value", folder) == 5
    (folder / "failing").mkdir()
    (folder / "failing" / "__init__.py").write_text("1 / 0\n")
    with pytest.raises(PluginError, match=r"'failing\.graders': cannot be imported: ZeroDivisionError"):
        find("failing.graders:value", folder)


def test_files_of_one_name_and_files_with_names_of_other_modules_are_modules_of_their_own(folder):
    other = folder.parent / "other"
    other.mkdir()
    for place, value in ((folder, 1), (other, 2)):
        for name in ("twin", "json", "with-hyphen", "with.dots"):
            (place / f"{name}.py").write_text(f"def f(): return {value}\nclass Box: ...\n")
    for name in ("twin", "json", "with-hyphen", "with.dots"):
        first, second = find(f"{name}.py:f", folder), find(f"{name}.py:f", other)
        assert (first(), second()) == (1, 2)
        assert find(f"{name}.py:f", folder) is first
        for function in (first, second):
            module = sys.modules[function.__module__]
            assert module.f is function
            assert __import__(function.__module__, fromlist=["f"]) is module  # as pickle does
    import json

    assert json.loads("1") == 1
    assert find("json:loads", folder) is json.loads  # what is installed comes first


def test_a_path_of_links_is_the_file_that_they_lead_to(folder, monkeypatch):
    (folder / "linked.py").write_text("def f(): ...\n")
    link = folder.parent / "link"
    link.symlink_to(folder)
    monkeypatch.syspath_prepend(str(link))
    assert located("linked.py:f", link) == located("linked:f", folder) == f"{folder.resolve()}/linked.py:f"
    assert find("linked.py:f", link).__module__ == "linked"
    assert find("linked:f", folder) is find("linked.py:f", link)


GRADER = """
import multiprocessing, pickle
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

@dataclass
class Pair:
    completion: str
    answer: str

def grade(pair):
    return float(pair.answer in pair.completion)

def executor(method, pairs):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        return list(pool.map(grade, pairs))

def pool(method, pairs):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(grade, pairs)

def graded(completions, answer, method, **_):
    pairs = [Pair(*pair) for pair in zip(completions, answer)]
    assert pickle.loads(pickle.dumps(pairs)) == pairs
    got = executor(method[0], pairs)
    assert got == pool(method[0], pairs)
    return got
"""

SCORED = """
import sys
import mlxrl as rl
from mlxrl.plugins import located
from mlxrl.settings import Reward
from mlxrl.types import Trajectory, Turn

if __name__ == "__main__":
    name, method = sys.argv[1:]
    group = [
        Trajectory(rl.Task("q", {"answer": answer, "method": method}), (Turn((1,), (2,), (0.0,), text),))
        for text, answer in (("it is 4", "4"), ("it is 5", "6"))
    ]
    reward = Reward(functions=(located(name, "conf"),))
    print([one.reward for one in rl.score([tuple(group)], reward)[0]])
"""


def run(folder, text, *arguments):
    (folder.parent / "script.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py", *arguments], cwd=folder.parent, env=environment, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("name", ["pooled.py:graded", "pooled:graded"])
def test_processes_that_a_file_starts_find_what_it_defines(folder, name, method):
    """A file's function, and instances of its classes, are handed to pools of every start method, and pickled."""
    (folder / "pooled.py").write_text(GRADER)
    assert run(folder, SCORED, name, method) == "[1.0, 0.0]"


def test_a_file_that_is_named_and_imported_exists_once(folder):
    (folder / "turn_log.py").write_text("LOG = []\ndef turns_seen(): return len(LOG)\n")
    (folder / "turn_world.py").write_text("import turn_log\ndef step(): turn_log.LOG.append(1)\n")
    for order in (("log", "world"), ("world", "log")):
        found = {name: find(f"turn_{name}.py:{'step' if name == 'world' else 'turns_seen'}", folder) for name in order}
        seen = found["log"]()
        found["world"]()
        assert found["log"]() == seen + 1


WORLD = """
import multiprocessing
import mlxrl as rl
import counted

class World:
    def reset(self, task): return task.prompt
    def step(self, reply):
        counted.STEPS.append(reply)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return rl.Feedback(reward=sum(pool.map(counted.half, [1.0, 3.0])), done=True)
"""

COUNTED = """
from concurrent.futures import ProcessPoolExecutor
STEPS = []

def half(value):
    return value / 2

def steps_so_far(completions, **_):
    with ProcessPoolExecutor(1) as pool:
        return list(pool.map(half, [len(STEPS)] * len(completions)))
"""


def test_a_run_whose_files_import_each_other_and_start_processes(folder):
    """4 episodes, which earn 1/2 + 3/2 each; the reward function sees the 4 steps of the environment: 4/2 for each."""
    (folder / "world.py").write_text(WORLD)
    (folder / "counted.py").write_text(COUNTED)
    (folder / "run.toml").write_text(
        f'steps = 1\n[model]\nid = "{EXAMPLE}"\n[data]\ntrain = "{EXAMPLE}/train.jsonl"\nprompt = "question"\n'
        '[reward]\nfunctions = ["counted.py:steps_so_far"]\n[environment]\nfactory = "world.py:World"\n'
        '[sampling]\nmax_tokens = 4\n[rollout]\ntasks_per_step = 2\ngroup_size = 2\n[run]\nfolder = "out"\n'
    )
    command = [sys.executable, "-m", "mlxrl", "train", "--config", "conf/run.toml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder.parent, env=environment, check=True, capture_output=True, timeout=120)
    (metrics,) = read_lines(folder.parent / "out" / "metrics.jsonl")
    assert metrics["reward"] == 4.0
