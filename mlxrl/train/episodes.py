"""What episodes were like, as metrics."""

from __future__ import annotations

from collections.abc import Sequence

from mlxrl.types import Metrics, Trajectory

STOPS = ("done", "turns", "length", "error")


def of_episodes(trajectories: Sequence[Trajectory]) -> Metrics:
    """Means and counts of trajectories that an environment had a part in; nothing where there are none.

    episodes/turns: mean number of turns; episodes/invalid, episodes/errors: how many actions were invalid, how many
    environments failed, and how the first did in episodes/error; episodes/close_errors: how many could not be closed,
    and how the first in episodes/close_error; episodes/rewritten: turns that began a row of their own; stops/...: the
    share of episodes that ended so.
    """
    played = [one for one in trajectories if one.error or "environment" in one.rewards or one.stop in ("done", "turns")]
    if not played:
        return {}
    turns = [turn for one in played for turn in one.turns]
    errors = [one.error for one in played if one.error]
    unclosed = [one.close_error for one in played if one.close_error]
    metrics: Metrics = {
        "episodes/turns": len(turns) / len(played),
        "episodes/invalid": float(sum(turn.invalid for turn in turns)),
        "episodes/rewritten": float(sum(turn.history_rewritten for turn in turns)),
        "episodes/errors": float(len(errors)),
        "episodes/close_errors": float(len(unclosed)),
    }
    for stop in STOPS:
        metrics[f"stops/{stop}"] = sum(one.stop == stop for one in played) / len(played)
    firsts = {"episodes/error": errors, "episodes/close_error": unclosed}
    return {**metrics, **{name: found[0] for name, found in firsts.items() if found}}
