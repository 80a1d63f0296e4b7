"""`mlxrl lineage`: the adapters that an adapter came from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mlxrl.runs.folder import near
from mlxrl.runs.lineage import Ancestor, lineage
from mlxrl.text import safe

DIGITS = 12
"""Of a digest that are shown."""


def command(arguments: argparse.Namespace) -> int:
    """Print a line for each adapter, the given one first."""
    found = lineage(arguments.name)
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        print("\n".join(safe(_line(one)) for one in found))
    return 0


def _line(one: Ancestor) -> str:
    digest = f"sha256:{one.sha256[:DIGITS]}" if one.sha256 else "no digest"
    handoff = one.handoff
    if handoff is None:
        return f"{digest:<21}missing: {one.missing}"
    steps = f"{handoff.steps:,} step{'' if handoff.steps == 1 else 's'}"
    begun = "" if handoff.parent else ", from the model"
    words = (near(handoff.model.id), near(handoff.algorithm), f"{steps}{begun}", _held_out(handoff.evaluation))
    return f"{digest:<21}{'  '.join(words)}"


def _held_out(evaluation: Mapping[str, Any]) -> str:
    """What is known of the held-out examples, before and after training."""
    if evaluation.get("state") == "not_run":
        return f"not evaluated: {evaluation.get('reason')}"
    name = "loss" if "loss_difference" in evaluation and "difference" not in evaluation else "accuracy"
    before, after = (_number(evaluation.get(when), name) for when in ("before", "after"))
    return f"held-out {name} {before} -> {after}"


def _number(summary: Any, name: str) -> str:
    value = summary.get(name) if isinstance(summary, Mapping) else None
    return f"{value:.3f}" if isinstance(value, int | float) else "-"
