"""The evaluations of a run: what is evaluated when, what is recorded of it, and what follows from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mlxrl.files import plain
from mlxrl.rewards import RewardError
from mlxrl.runs import facts
from mlxrl.runs.experiment import Experiment
from mlxrl.runs.folder import RunFolder
from mlxrl.runs.selection import Selection
from mlxrl.runs.sinks import Sink

if TYPE_CHECKING:
    from mlxrl.policy.policy import Policy
    from mlxrl.train.evaluate import Evaluation
    from mlxrl.train.state import RunState
    from mlxrl.types import Task

Busy = Callable[[str], AbstractContextManager[None]]


@dataclass(slots=True)
class Evaluations:
    """The evaluations of a run under way.

    Held-out examples are evaluated before training, every run.evaluate_every steps, and at the end, with the adapter
    that is the result. data.validation is evaluated before training, every so many steps and after the last one; by it
    the result is chosen, a run ends early, and an adapter is taken back.

    state: whose `values` hold the selection. busy: the span of something that takes a while, shown to people.
    report: what evaluation.json says.
    """

    experiment: Experiment
    folder: RunFolder
    policy: Policy
    state: RunState
    sinks: Sequence[Sink]
    busy: Busy
    report: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def selection(self) -> Selection:
        """What the evaluations on data.validation have come to."""
        return Selection.of_json(self.state.values.get("selection", {}))

    def _select(self, selection: Selection) -> None:
        self.state.values["selection"] = selection.as_json()

    @property
    def stopped(self) -> bool:
        """Whether the run ends early: there was no improvement in run.patience evaluations."""
        patience = self.experiment.config.run.patience
        return 0 < patience <= self.selection.since

    def before(self) -> None:
        """Evaluate what training starts from, where that was not done before; write evaluation.json in any case."""
        from mlxrl.policy.lora import with_leaves

        self.report = self._begun()
        with with_leaves(self.policy.model, self.policy.initial):
            if self.experiment.held_out and "before" not in self.report:
                self._record("before", 0, self._held_out(0, "before training"))
            if self.experiment.validation and self.selection.best is None:
                self._validate(0, "before training")
        self._write()

    def after_step(self) -> bool:
        """Evaluate where that is due after a step, and judge its adapter; whether training goes on.

        A step is evaluated once; a run that is resumed makes up for an evaluation that was cut off. The run lives
        where one cannot be scored.
        """
        experiment, done, when = self.experiment, self.state.step, f"after step {self.state.step}"
        last = done >= experiment.config.steps
        if done > self.selection.evaluated and (due(experiment.config.run.evaluate_every, done) or last):
            try:
                rejected = bool(experiment.validation) and self._validate(done, when)
                if experiment.held_out and not (last or rejected or self.stopped):
                    self._held_out(done, when)
            except RewardError as error:
                self.folder.event("evaluation failed", when=when, error=str(error))
                warnings.warn(f"evaluation {when}: {error}", stacklevel=2)
            self._select(replace(self.selection, evaluated=done))
        if self.stopped and not last:
            self.folder.event("stopped early", step=done, best_step=self.selection.step)
        return not (last or self.stopped)

    def save(self) -> None:
        """Write adapters/: the best adapter with run.keep = "best", else the last."""
        from mlxrl.policy.adapter_folder import read
        from mlxrl.policy.lora import with_leaves

        if not self._keeps_best:
            return self.policy.save(self.folder.adapters)
        saved = read(self.folder.best / step_name(self.selection.step))
        with with_leaves(self.policy.model, saved.weights):
            return self.policy.save(self.folder.adapters)

    def after(self) -> None:
        """Evaluate what adapters/ holds, as it is read from there, and compare it with the evaluation before."""
        from mlxrl.policy.adapter_folder import WEIGHTS, load_weights
        from mlxrl.train.comparison import Scores, compare

        if self.experiment.held_out:
            load_weights(self.policy.model, self.folder.adapters)
            step = self.selection.step if self._keeps_best else self.state.step
            found = self._held_out(step, "after training")
            compared = compare(Scores.of_json(self.report["scores"]["before"]), found)
            digest = facts.digest(self.folder.adapters / WEIGHTS)
            self.report |= {"state": "done"}
            self._record("after", step, found, **compared, adapter=digest)
        self._write()

    @property
    def lines(self) -> list[str]:
        """How the result was chosen, for people."""
        chosen, patience = self.selection, self.experiment.config.run.patience
        found: list[str] = []
        if self.stopped:
            found.append(
                f"ended      after step {self.state.step}: no improvement on data.validation in {patience} evaluations"
            )
        if self._keeps_best and chosen.best is not None:
            place = f"after step {chosen.step}" if chosen.step else "before training"
            found.append(f"the best   {place}: mean reward {chosen.best.mean:.3f} on data.validation")
        return found

    @property
    def _keeps_best(self) -> bool:
        return self.experiment.config.run.keep == "best"

    def _begun(self) -> dict[str, Any]:
        """What evaluation.json says before there are numbers, and what it has of the same evaluation already."""
        source = self.experiment.config.data.evaluation
        if source is None:
            return {"state": "not_run", "reason": "data.evaluation is left out"}
        made = {"settings": self.experiment.evaluation_settings()}
        made |= {"examples": facts.data_digest(source, self.experiment.held_out)}
        known = self.folder.evaluation()
        same = all(known.get(name) == plain(value) for name, value in made.items())
        scores = {"before": known["scores"]["before"]} if same and "before" in known else {}
        before = {"before": known["before"], "scores": scores} if scores else {}
        return {"state": "begun", **made, **before}

    def _evaluate(self, tasks: Sequence[Task], step: int, samples: int = 0) -> Evaluation:
        with self.busy(f"evaluating {len(tasks):,} held-out examples"):
            return self.experiment.evaluate(self.policy, tasks, step, samples)

    def _held_out(self, step: int, when: str) -> Evaluation:
        config = self.experiment.config
        found = self._evaluate(self.experiment.held_out, step, config.evaluation.samples)
        summary = found.summary(config.evaluation.success)
        for sink in self.sinks:
            sink.evaluation(when, summary)
        self.folder.event("evaluation", when=when, step=step, **summary)
        return found

    def _validate(self, step: int, when: str) -> bool:
        """Evaluate data.validation, and judge the adapter; whether it was taken back."""
        config = self.experiment.config
        found = self._evaluate(self.experiment.validation, step)
        selection, verdict = self.selection.judged(step, found.scores, config.run.accept_margin)
        summary = {**found.summary(config.evaluation.success), **verdict}
        for sink in self.sinks:
            sink.validation(when, summary)
        self.folder.event("validation", when=when, step=step, **summary)
        rejected = verdict.get("decision") == "rejected"
        if rejected:
            self._take_back(selection.accepted)
        else:
            self._keep(selection)
        self._select(selection)
        self._write()
        return rejected

    def _keep(self, selection: Selection) -> None:
        """Keep the adapter of the present step as the last accepted one, and as the best, where it is that."""
        from mlxrl.train import checkpoint

        step = selection.evaluated
        if self.experiment.config.run.accept_margin is not None:
            checkpoint.save(self.folder.accepted / step_name(step), self.policy, self.state, self.experiment.algorithm)
            self.folder.prune(self.folder.accepted, step)
        if self._keeps_best and selection.step == step:
            self.policy.save(self.folder.best / step_name(step))
            self.folder.prune(self.folder.best, step)

    def _take_back(self, step: int) -> None:
        """Put back adapters, optimizer and counters of an accepted step.

        The number of steps taken stays, and with it data and keys go on: the same steps are not taken again.
        """
        from mlxrl.train import checkpoint

        taken, values = self.state.step, self.state.values
        accepted = checkpoint.read(self.folder.accepted / step_name(step))
        checkpoint.restore(accepted, self.policy, self.state, self.experiment.algorithm)
        self.state.step, self.state.values = taken, values

    def _record(self, name: str, step: int, found: Evaluation, **more: Any) -> None:
        summary = {"step": step, **found.summary(self.experiment.config.evaluation.success)}
        scores = {**self.report.get("scores", {}), name: found.scores.as_json()}
        self.report |= {name: summary, **more, "scores": scores}

    def _write(self) -> None:
        chosen, scores = self.selection, {name: self.report[name] for name in ("scores",) if name in self.report}
        validation: Mapping[str, Any] = {}
        if chosen.best is not None:
            made = {"best_step": chosen.step, "mean_reward": chosen.best.mean, "evaluations_since": chosen.since}
            validation = {"validation": made}
        rest = {name: value for name, value in self.report.items() if name != "scores"}
        self.folder.record_evaluation({**rest, **validation, **scores})


def step_name(step: int) -> str:
    """The name of a folder with what a run was after so many steps."""
    return f"step-{step:06d}"


def due(every: int, done: int) -> bool:
    """Whether what is done every so many steps is due after so many; 0 is never."""
    return every > 0 and done % every == 0
