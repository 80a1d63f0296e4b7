"""Our pieces against the numbers of the libraries they are taken from: verl, TRL, OpenRLHF, slime, prime-rl, tinker,
verl-agent and OpenClaw-RL, run in float64 on the same inputs.

The folder is `tests/oracles`, or the one that MLXRL_ORACLES names. Every golden of a case is compared, advantages,
losses, gradients and metrics alike, with the tolerance of `oracles.case.faults`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from oracles import credit, distillation, mismatch, policy
from oracles.case import Case, Results, faults

FOLDER = Path(os.environ.get("MLXRL_ORACLES", Path(__file__).parent / "oracles"))
RUNNERS: dict[tuple[str, str], Callable[[Case], Results]] = {
    **policy.RUNNERS,
    **credit.RUNNERS,
    **mismatch.RUNNERS,
    **distillation.RUNNERS,
}
# Variants not run, and why.
LEFT_OUT: dict[tuple[str, str], str] = {
    ("gated_delta", "qwen3_5"): "a layer of the model, not of the algorithms; not covered yet",
}
# Goldens not compared, and why.
NOT_COMPARED: dict[tuple[str, str, str], str] = {}


def cases(pattern: str) -> list[Path]:
    found = sorted(FOLDER.glob(pattern))
    assert found, f"no {pattern} in {FOLDER}"
    return found


def variant(path: Path) -> tuple[str, str]:
    family, name, *_ = path.stem.split("__")
    return family, name


@pytest.mark.parametrize("path", cases("*.npz"), ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    if variant(path) in LEFT_OUT:
        pytest.skip(LEFT_OUT[variant(path)])
    case = Case.load(path)
    got = RUNNERS[case.family, case.variant](case)
    missing = [name for name in case.goldens if name not in got]
    assert [name for name in missing if (case.family, case.variant, name) not in NOT_COMPARED] == []
    assert faults(case, {name: value for name, value in got.items() if name in case.arrays}) == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("shaping_and_filtering__*.json")), ids=lambda path: path.stem)
def test_shaping_and_filtering(path: Path) -> None:
    assert credit.shaping_faults(json.loads(path.read_text())) == []


def test_checker_finds_faults() -> None:
    """A golden moved by more than its tolerance, 1e-5 |want| + 1e-6 S, is reported; one moved by less is not."""
    case = Case.load(cases("grpo__verl_token_mean_kl__*.npz")[0])
    want = case.out("advantages")
    assert faults(case, {"out_advantages": want * (1 + 5e-6)}) == []
    assert len(faults(case, {"out_advantages": want * (1 + 5e-5)})) == 1
    assert len(faults(case, {"out_advantages": want[:1]})) == 1
    assert len(faults(case, {"out_advantages": want * float("nan")})) == 1
