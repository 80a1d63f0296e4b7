"""Algorithms from a table [algorithm] and back: terms, conventions, an own function, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxrl import algo
from mlxrl.algo import KL, Correction, TeacherAdvantage, TeacherKL, TeacherSurrogate, TeacherTopK, Whiten
from mlxrl.algo.algorithm import TERMS
from mlxrl.algo.conventions import CONVENTIONS, MOVED
from mlxrl.errors import UserError


def test_the_keys_are_arguments_and_the_tables_terms() -> None:
    got = algo.build({"name": "grpo", "clip": [0.2, 0.28], "kl": {"coefficient": 0.04}, "correction": {}})
    assert got == algo.grpo(clip=(0.2, 0.28), terms=[KL(coefficient=0.04), Correction()])
    assert algo.build({}) == algo.grpo()
    assert algo.build({"name": "dr_grpo", "reduction": 256}) == algo.dr_grpo(reduction=256.0)
    assert algo.build({"name": "reinforce_pp", "whiten": {"ddof": 0}}) == algo.reinforce_pp(whiten=Whiten(ddof=0))


def test_a_teachers_table_takes_the_place_of_the_default() -> None:
    assert algo.build({"name": "opd"}) == algo.opd(teacher=TeacherAdvantage())
    assert algo.build({"name": "opd", "teacher_top_k": {"k": 8}}) == algo.opd(teacher=TeacherTopK(k=8))
    assert algo.build({"teacher_advantage": {}}) == algo.grpo(terms=[TeacherAdvantage()])


def test_a_convention_stands_below_what_is_given_and_its_tables_hold_for_terms_that_are_there() -> None:
    assert algo.build({"convention": "verl"}) == algo.grpo(dual_clip=3.0, reduction="token_mean")
    got = algo.build({"convention": "verl", "dual_clip": 5.0, "kl": {"coefficient": 0.1}})
    kl = KL(coefficient=0.1, clamp=(-10.0, 10.0))
    assert got == algo.grpo(dual_clip=5.0, reduction="token_mean", terms=[kl])
    got = algo.build({"convention": "verl", "kl": {"coefficient": 0.1, "clamp": [-1, 1]}})
    assert got == algo.grpo(dual_clip=3.0, reduction="token_mean", terms=[KL(coefficient=0.1, clamp=(-1.0, 1.0))])
    whiten = Whiten(ddof=0, eps=0.0, floor=1e-8)
    assert algo.build({"name": "reinforce_pp", "convention": "openrlhf"}) == algo.reinforce_pp(whiten=whiten)
    assert algo.build({"name": "rloo", "convention": "openrlhf"}) == algo.rloo()
    assert algo.build({"name": "rloo", "convention": "openrlhf", "whiten": {}}) == algo.rloo(whiten=whiten)


def test_conventions_of_a_teacher_reach_the_term_that_is_there() -> None:
    ten = (-10.0, 10.0)
    got = algo.build({"name": "opd", "convention": "verl"})
    assert got == algo.opd(teacher=TeacherAdvantage(clamp=ten), dual_clip=3.0)
    # nothing is left of the policy loss, so a dual clip has no effect; a convention's is no mistake
    assert algo.build({"name": "opd", "convention": "verl", "teacher_kl": {}}).terms == (TeacherKL(clamp=ten),)
    got = algo.build({"name": "opd", "convention": "openclaw", "teacher_surrogate": {}})
    assert got.terms == (TeacherSurrogate(clip=(0.2, 0.28), gap_clamp=(-1.0, 1.0)),)


@pytest.mark.parametrize("name", algo.RECIPES)
def test_the_table_of_an_algorithm_makes_it_again(name: str) -> None:
    """Under every convention that knows it, and with every term."""
    every: dict[str, Any] = {
        "kl": {"coefficient": 0.1, "clamp": [-1, None]}, "kl_reward": {"coefficient": 0.1, "gamma": 0.5},
        "entropy": {"coefficient": 0.1}, "correction": {"level": "sequence"}, "veto": {"threshold": 0.1},
        "off_policy": {"delta": 0.1}, "teacher_advantage": {"gamma": 0.5}, "echo": {"taper": 5, "skip": [3, 1]},
    }  # fmt: skip
    if name == "sft":
        every = {term: values for term, values in every.items() if term in ("kl", "entropy", "echo")}
    families = [None, *(family for family, known in CONVENTIONS.items() if name in known)]
    for family in families:
        for terms in ({}, every):
            made = algo.build({"name": name, "convention": family, **terms})
            table = algo.arguments_of(made)
            assert next(iter(table)) == "name"
            assert algo.build({"convention": family, **table}) == made
            assert set(terms) <= table.keys()


def test_the_table_shows_what_has_an_effect() -> None:
    assert algo.arguments_of(algo.dapo(scale="none", terms=[Correction()])) == {
        "name": "dapo", "clip": (0.2, 0.28), "dual_clip": None, "delta": None, "ratio": "token",
        "log_ratio_clamp": (-20.0, 20.0), "scale": "none", "whiten": None, "mask_truncated": False,
        "reduction": "token_mean", "correction": {
            "mode": "truncate", "level": "token", "bounds": (0.0, 2.0), "mask_level": None,
            "log_ratio_clamp": (-20.0, 20.0),
        },
    }  # fmt: skip
    taught = algo.arguments_of(algo.opd(teacher=TeacherKL()))
    assert taught == {
        "name": "opd", "reward": 0.0, "reduction": "token_mean",
        "teacher_kl": {"coefficient": 1.0, "estimator": "k3", "clamp": None},
    }  # fmt: skip
    assert algo.arguments_of(algo.luspo())["reduction"] == 1.0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a name": ({"name": "grpoo"}, "algorithm: name: unknown algorithm 'grpoo'; did you mean 'grpo'?"),
    "no name": ({"name": "zzz"}, "unknown algorithm 'zzz'; there are grpo, dr_grpo, dapo"),
    "a key": ({"clp": 1}, "algorithm: grpo: unknown key 'clp'; did you mean 'clip'?"),
    "a term's key": ({"estimator": "k2"}, "algorithm: grpo: unknown key 'estimator'; did you mean 'algorithm.kl.esti"),
    "a key in a term": ({"kl": {"coefficient": 1, "eps": 1}}, "algorithm.kl: unknown key 'eps'; did you mean 'al"),
    "another term's": ({"veto": {"threshold": 1, "bounds": 1}}, "unknown key 'bounds'; did you mean 'algorithm.corre"),
    "a slip": ({"kl": {"coeficient": 1}}, "algorithm.kl: unknown key 'coeficient'; did you mean 'coefficient'?"),
    "a bound": ({"kl": {"coefficient": 0}}, "algorithm.kl: coefficient: wanted more than 0, got 0"),
    "an argument": ({"eps": -1}, "algorithm: grpo: eps: wanted at least 0, got -1"),
    "no table": ({"teacher_kl": 1}, "algorithm.teacher_kl: wanted a table, got 1"),
    "a convention": ({"convention": "nobody"}, "grpo: convention: wanted one of openrlhf, slime, trl, verl, got"),
    "none": ({"name": "dppo", "convention": "trl"}, "dppo: convention: wanted one of verl, got"),
    "no effect": ({"name": "opd", "scale": "none"}, "algorithm: opd: scale: has no effect, because reward is 0"),
    "no mask": ({"correction": {"mask_level": "token"}}, "algorithm.correction: mask_level: has no effect, because mo"),
    "two teachers": ({"teacher_kl": {}, "teacher_advantage": {}}, "grpo: terms: wanted one that learns from a teacher"),
    "terms": ({"terms": [1]}, "algorithm: grpo: unknown key 'terms'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_is_refused_in_one_line(case: str) -> None:
    table, message = REFUSED[case]
    with pytest.raises(UserError) as caught:
        algo.build(table)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", [key for key in MOVED if key != "echo"])
def test_a_key_that_has_moved_names_its_new_place(key: str) -> None:
    with pytest.raises(UserError) as caught:
        algo.build({"name": "opd", key: 1})
    assert str(caught.value).startswith(f"algorithm: '{key}' is now ")
    for place in MOVED[key].split():
        if place.startswith("algorithm.") and place.count(".") == 2:
            table, name = place.rstrip(",").split(".")[1:]
            assert name in {**{"whiten": Whiten}, **TERMS}[table].__dataclass_fields__


def test_conventions_are_of_arguments_and_terms_that_exist() -> None:
    for family, known in CONVENTIONS.items():
        for name in known:
            every = {key: {} for key, value in known[name].items() if isinstance(value, dict) and "teacher" not in key}
            given = {key: {"coefficient": 1.0} if key.startswith("kl") else {} for key in every}
            assert algo.build({"name": name, "convention": family, **given}).name == name


OWN = """
import mlxrl as rl

def make(*, low, high=0.3, terms=()):
    return rl.Algorithm("mine", lambda groups: [], rl.algo.losses.Clipped(clip=(low, high)),
                        rl.algo.reduce.token_mean, tuple(terms))

def anything(**given):
    return rl.grpo(clip=(given["a"], given["b"]))

def nothing():
    return 3

def raises():
    return {}["x"]

def leaves():
    raise SystemExit(3)

three, dict = 3, dict
"""


def test_an_algorithm_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own_algo.py").write_text(OWN)

    def built(name: str, **table: Any) -> Any:
        return algo.build({"name": f"own_algo.py:{name}", **table}, tmp_path)

    got = built("make", low=0.1, kl={"coefficient": 0.5})
    assert (got.name, got.policy_loss.clip, got.terms) == ("mine", (0.1, 0.3), (KL(coefficient=0.5),))
    assert got.needs == {"old", "reward", "reference"}
    assert algo.arguments_of(got) == {"name": "mine"}
    assert built("anything", a=0.1, b=0.2) == algo.grpo(clip=(0.1, 0.2))
    for name, table, message in (
        ("make", {}, "algorithm: own_algo.py:make: missing a required argument: 'low'"),
        ("make", {"low": 1, "hih": 1}, "own_algo.py:make: unknown key 'hih'; did you mean 'high'?"),
        (
            "make",
            {"low": 1, "kl": {"coeficient": 1}},
            "algorithm.kl: unknown key 'coeficient'; did you mean 'coefficient'?",
        ),
        ("nothing", {}, "own_algo.py:nothing: wanted a function that returns an algorithm, got 3"),
        ("nothing", {"veto": {"threshold": 1}}, "own_algo.py:nothing: got an unexpected keyword argument 'terms'"),
        ("mak", {}, "algorithm: name: 'own_algo.py:mak': own_algo.py has no 'mak'; did you mean 'make'?"),
        ("three", {}, "algorithm: own_algo.py:three: wanted a function, got 3"),
        ("raises", {}, "algorithm: own_algo.py:raises: raised KeyError: 'x' ("),
        ("leaves", {}, "algorithm: own_algo.py:leaves: raised SystemExit: 3 ("),
        ("dict", {}, "algorithm: own_algo.py:dict: its parameters cannot be read; wrap it in a def"),
    ):
        with pytest.raises(UserError) as caught:
            built(name, **table)
        assert message in str(caught.value)
