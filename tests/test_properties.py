"""Whatever a config or a data file holds: it is accepted, or refused in one line. Cases are made by hypothesis."""

import json
import math
import tomllib

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import EXAMPLE, MAZE
from mlxrl import config, data
from mlxrl.algo.algorithm import TERMS
from mlxrl.algo.table import RECIPES
from mlxrl.checked import _choices, converted, hints_of
from mlxrl.errors import UserError
from mlxrl.files import append_lines, read_lines
from mlxrl.messages import ROLES
from mlxrl.runs.experiment import Experiment
from mlxrl.runs.facts import data_digest
from mlxrl.tables import Config

LONGEST = 4000
"""Characters of a message at most."""
DURATION = [40, pytest.param(1000, marks=pytest.mark.slow)]
"""Cases of a property: some in every run, and so many as take a quarter of a minute."""


def holds_for(examples, strategy, property_):
    """Whether a property holds for so many cases, the same in every run."""
    health = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    chosen = settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=health
    )
    chosen(given(strategy)(property_))()


def accepted(make):
    """What a function makes, None where it refuses in one line; anything else that it raises ends the test."""
    try:
        return make()
    except UserError as error:
        line = str(error)
        assert line.strip()
        assert len(line.splitlines()) == 1
        assert len(line) <= LONGEST
        return None


# Values of TOML and JSON, whatever is wanted.

TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(["", " ", "\0", "\x1b[31m", "a:b", "a.py:f", "os:sep", "./none", "~", "..", "\u202e", "x" * 5000]),
)
NUMBERS = st.one_of(
    st.integers(), st.integers(-3, 3), st.sampled_from([2**31 - 1, 2**31, 2**63, -(2**63), 10**400]),
    st.floats(), st.floats(0, 1), st.sampled_from([1e-300, 1e39, 1e308, 0.1, 1.0, math.inf, math.nan]),
)  # fmt: skip
SCALARS = st.one_of(TEXTS, NUMBERS, st.booleans(), st.dates(), st.times(), st.datetimes())
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)


# Configs: keys with values that their declarations allow, and at times one that is anything.

POOL = [
    True, False, 0, 1, 2, 3, 40, 0.5, 0.9, 1.5, 5e-4, math.inf, "question", "answer", "base", [], ["answer"],
    [0.1, 0.2], [1, 2], {}, {"answer": "question"},
]  # fmt: skip


def allowed(hint):
    """Values that a declaration allows."""
    found = []
    for value in [*_choices(hint), *POOL]:
        try:
            converted(hint, value)
        except UserError:
            continue
        found.append(value)
    return st.sampled_from(found) if found else ANYTHING


def table_of(cls):
    """A few keys of a table, or of a recipe."""
    hints = {name: hint for name, hint in hints_of(cls).items() if name not in ("terms", "teacher")}
    return some({name: allowed(hint) for name, hint in hints.items()})


def some(strategies, most=2):
    """A few of several keys, with a value each."""
    return st.lists(st.sampled_from(sorted(strategies)), max_size=most, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: strategies[name] for name in names})
    )


def algorithms():
    """A recipe, some of its arguments and terms."""
    terms = some({name: table_of(term) for name, term in TERMS.items()}, 1)
    return st.sampled_from(sorted(RECIPES)).flatmap(
        lambda name: st.tuples(st.just({"name": name}), table_of(RECIPES[name]), terms).map(merged)
    )


def base():
    """A config that is right."""
    return {
        "model": {"id": str(EXAMPLE)},
        "data": {"train": "train.jsonl", "prompt": "question"},
        "reward": {"functions": ["mlxrl.rewards:last_number_matches"]},
        "rollout": {"tasks_per_step": 1},
    }


def merged(parts):
    made = {}
    for part in parts:
        for name, value in part.items():
            old = made.get(name)
            made[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return made


def documents():
    """Configs: the one that is right, with a few keys more, and at times something else in a place."""
    known = {name: table_of(cls) for name, cls in config.tables().items()} | {"algorithm": algorithms()}
    numbers = some({name: allowed(hints_of(Config)[name]) for name in ("seed", "steps")}, 1)
    held_out = st.sampled_from([{}, {"data": {"evaluation": "test.jsonl"}}])
    environment = st.sampled_from([{}, {}, {"environment": {"factory": f"{MAZE}:Maze"}}])
    strange = st.one_of(
        st.dictionaries(st.one_of(TEXTS, st.sampled_from(sorted(known))), ANYTHING, max_size=1),
        st.sampled_from(sorted(known)).flatmap(
            lambda name: st.tuples(st.just(name), st.dictionaries(TEXTS, ANYTHING, max_size=1))
        ).map(lambda pair: dict([pair])),
        st.sampled_from([key.name.split(".") for key in config.keys()]).flatmap(  # noqa: SIM118
            lambda path: ANYTHING.map(lambda value: {path[0]: {path[1]: value}} if path[1:] else {path[0]: value})
        ),
    )  # fmt: skip
    right = st.tuples(st.just(base()), held_out, environment, some(known), numbers).map(merged)
    return st.one_of(right, st.tuples(right, strange).map(merged))


def written(document):
    try:
        return tomli_w.dumps(document).encode()
    except (TypeError, ValueError):  # as None, or a whole number of 5,000 digits
        return b""


def as_toml(value):
    """A value as an assignment has it; a text bare."""
    return value if isinstance(value, str) else written({"a": value}).decode().strip().removeprefix("a = ")


def damaged(content):
    """Bytes of which a piece is left out, doubled, or replaced."""
    piece = st.tuples(st.integers(0, len(content)), st.integers(0, 9), st.binary(max_size=4) | st.just(b"\n"))
    whole = st.just(content)
    return st.one_of(whole, whole, whole, piece.map(lambda p: content[: p[0]] + p[2] + content[p[0] + p[1] :]))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"question": "1+1=?", "answer": "2"}\n' * 3)
    (tmp_path / "test.jsonl").write_text('{"question": "1+2=?", "answer": "3"}\n')
    return tmp_path


@pytest.mark.parametrize("examples", DURATION)
@pytest.mark.filterwarnings("ignore")
def test_a_config_is_accepted_or_refused_in_a_line(folder, examples):
    """What is accepted is the same again from the text that a run keeps of it."""

    def property_(content):
        path = folder / "run.toml"
        path.write_bytes(content)
        found = accepted(lambda: Experiment.of(*config.read(path)))
        if found is None:
            return
        text = found.toml()
        assert tomllib.loads(text) == config.resolved(found.config, found.table)
        path.write_text(text)
        assert Experiment.of(*config.read(path)).toml() == text

    holds_for(examples, documents().map(written).flatmap(damaged), property_)


@pytest.mark.parametrize("examples", DURATION)
@pytest.mark.filterwarnings("ignore")
def test_an_override_is_accepted_or_refused_in_a_line(folder, examples):
    declared = {name: hints_of(cls) for name, cls in config.tables().items()}
    known = {f"{table}.{key}": allowed(hint) for table, hints in declared.items() for key, hint in hints.items()}
    right = st.sampled_from(sorted(known)).flatmap(lambda name: st.tuples(st.just(name), known[name]))
    strange = st.tuples(st.one_of(st.sampled_from(sorted(known)), TEXTS), ANYTHING)
    pair = st.one_of(right, right, strange).map(lambda pair: f"{pair[0]}={as_toml(pair[1])}")
    (folder / "run.toml").write_bytes(written(base()))

    def property_(overrides):
        accepted(lambda: Experiment.of(*config.read(folder / "run.toml", overrides)))

    holds_for(examples, st.lists(st.one_of(pair, pair, TEXTS), min_size=1, max_size=2), property_)


# Data: prompts of every form, columns, and lines that are damaged.

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PARTS = st.lists(
    st.one_of(st.text(max_size=5), st.fixed_dictionaries({}, optional={"type": st.just("text"), "text": JSON}))
)
CALLS = st.lists(
    st.fixed_dictionaries({}, optional={
        "name": st.just("f") | JSON, "arguments": JSON | JSON.map(json.dumps),
        "function": st.fixed_dictionaries({}, optional={"name": st.just("f"), "arguments": JSON}) | JSON,
    }), max_size=2,
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries({}, optional={
        "role": st.sampled_from(ROLES) | JSON, "content": st.text(max_size=8) | PARTS | JSON, "name": JSON,
        "tool_calls": CALLS | JSON,
    }), max_size=3,
)  # fmt: skip
PROMPTS = st.one_of(st.text(max_size=8), MESSAGES, st.lists(st.integers(-2, 2**40), max_size=3), JSON)
RIGHT = st.fixed_dictionaries({"prompt": st.text(min_size=1, max_size=8)}, optional={"answer": st.text(max_size=8)})
ROWS = st.one_of(
    RIGHT, RIGHT,
    st.fixed_dictionaries({"prompt": PROMPTS}, optional={"answer": JSON, "completions": JSON, "é\ud800": JSON}), JSON,
)  # fmt: skip


def lines(rows, encoding, separator):
    return separator.join(json.dumps(row, ensure_ascii=encoding != "utf-8") for row in rows).encode(
        encoding, "surrogatepass" if encoding != "ascii" else "replace"
    )


FILES = st.builds(
    lines, st.lists(ROWS, max_size=3), st.sampled_from(["utf-8", "ascii", "ascii", "utf-16"]),
    st.sampled_from(["\n", "\n", "\n", "\r\n", "\n\n", ",", "\u2028"]),
)  # fmt: skip


@pytest.mark.parametrize("examples", DURATION)
def test_lines_are_read_or_refused_in_a_line(tmp_path, examples):
    """What is read has a digest and can be written down."""

    def property_(content):
        path, written = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
        path.write_bytes(content)
        found = accepted(lambda: data.tasks(path))
        if found is None:
            return
        assert data_digest("a.jsonl", found)["examples"] == len(found)
        written.unlink(missing_ok=True)
        append_lines(written, [{"prompt": task.prompt, "columns": task.columns} for task in found])
        assert len(read_lines(written)) == len(found)

    holds_for(examples, FILES.flatmap(damaged), property_)


@pytest.mark.parametrize("examples", DURATION)
def test_rows_of_any_kind_are_read_or_refused_in_a_line(examples):
    def property_(rows):
        accepted(lambda: data.tasks(rows))

    holds_for(examples, st.lists(ROWS, max_size=3), property_)
