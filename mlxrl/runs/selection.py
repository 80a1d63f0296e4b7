"""Which adapter of a run is chosen by its evaluations on data.validation: values, and the rules that change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlxrl.train.comparison import Scores, compare, gain, gain_interval

COUNTS = ("step", "since", "accepted", "evaluated")


@dataclass(frozen=True, slots=True)
class Selection:
    """What the evaluations of a run have come to; a checkpoint holds it.

    best: the scores of the best accepted adapter, None before the first evaluation; step: the step it was taken after.
    since: evaluations since then; accepted: the step of the last accepted adapter; evaluated: of the last evaluation.
    """

    best: Scores | None = None
    step: int = 0
    since: int = 0
    accepted: int = 0
    evaluated: int = 0

    def as_json(self) -> dict[str, Any]:
        """The selection as strict JSON."""
        best = None if self.best is None else self.best.as_json()
        return {"best": best, **{name: getattr(self, name) for name in COUNTS}}

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Selection:
        """The selection that `as_json` made the value of; of nothing, that of a run that begins."""
        best = value.get("best")
        counts = {name: int(value.get(name, 0)) for name in COUNTS}
        return cls(None if best is None else Scores.of_json(best), **counts)

    def judged(self, step: int, scores: Scores, margin: float | None = None) -> tuple[Selection, dict[str, Any]]:
        """The selection after an evaluation, and what was found: `compare` of it with the best, and the decision.

        An adapter is the best where its mean reward is higher than that of the best so far on the same examples, or,
        where there are no rewards, its loss on their answers lower. With
        a margin it is "rejected" where the upper bound of the difference's 95 % interval lies below -margin: where it
        has lost more than the margin beyond what chance explains. Else it is "accepted".
        """
        if self.best is None:
            return Selection(scores, step, 0, step, step), {"best_step": step}
        found = compare(self.best, scores)
        rejected = margin is not None and gain_interval(found)[1] < -margin
        after = replace(self, since=self.since + 1, evaluated=step, accepted=self.accepted if rejected else step)
        if gain(found) > 0:
            after = replace(after, best=scores, step=step, since=0)
        decision = {} if margin is None else {"decision": "rejected" if rejected else "accepted", "margin": margin}
        return after, {**found, **decision, "best_step": after.step}
