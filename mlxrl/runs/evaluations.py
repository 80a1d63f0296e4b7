"""The evaluations of a run: what is evaluated when, what is recorded of it, and what follows from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
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
    from mlxrl.train.step import Steps

Busy = Callable[[str], AbstractContextManager[None]]


@dataclass(slots=True)
class Evaluations:
    """The evaluations of a run under way.

    Held-out examples are evaluated before training, every run.evaluate_every steps, and at the end, with the adapter
    that is the result. data.validation is evaluated before training, every so many steps and after the last one; by it
    the result is chosen, a run ends early, and an adapter is taken back.

    steps: in whose state the selection is. busy: the span of something that takes a while, shown to people.
    report: the contents of evaluation.json.
    """

    experiment: Experiment
    folder: RunFolder
    policy: Policy
    steps: Steps
    sinks: Sequence[Sink]
    busy: Busy
    report: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def selection(self) -> Selection:
        """What the evaluations so far have come to."""
        return Selection.of_json(self.steps.state.values.get("selection", {}))

    @property
    def stopped(self) -> bool:
        """Whether the run ends early: there was no improvement in run.patience evaluations."""
        return 0 < self.experiment.config.run.patience <= self.selection.since

    def before(self) -> None:
        """Evaluate what training starts from, where that was not done before; write evaluation.json in any case."""
        from mlxrl.policy.lora import with_leaves

        self.report = self._begun()
        if "before" in self.report and not self.steps.state.step:
            self._tell({name: value for name, value in self.report["before"].items() if name != "step"})
        if self.experiment.held_out and "before" not in self.report:
            with with_leaves(self.policy.model, self.policy.initial):
                found = self._held_out(0, "before training")
            self._record("before", 0, found)
        if self.experiment.validation and not self._has_chosen():
            self._select(Selection())
            taken = self.steps.state.step
            self._validate(f"after step {taken}" if taken else "before training")
        self._write()

    def after_step(self) -> bool:
        """Evaluate where that is due after a step, and judge its adapter; whether training goes on.

        A step is evaluated once; a run that is resumed makes up for an evaluation that was cut off. The run lives
        where one cannot be scored.
        """
        experiment, taken = self.experiment, self.steps.state.step
        when, last, before = f"after step {taken}", taken >= experiment.config.steps, self.selection
        if taken > self.selection.evaluated and (due(experiment.config.run.evaluate_every, taken) or last):
            try:
                rejected = bool(experiment.validation) and self._validate(when)
                if experiment.held_out and not (last or rejected or self.stopped):
                    self._held_out(taken, when)
            except RewardError as error:
                self.folder.event("evaluation failed", when=when, error=str(error))
                warnings.warn(f"evaluation {when}: {error}", stacklevel=2)
            except BaseException:
                if self.selection.accepted == taken:  # cut off after data.validation: both are made up for
                    self._select(before)
                raise
            self._select(replace(self.selection, evaluated=taken))
            if self.stopped and not last:
                self.folder.event("stopped early", step=taken, best_step=self.selection.step)
        return not (last or self.stopped)

    def save(self, target: Path) -> None:
        """Save the run's result: the best adapter with run.keep = "best", else the last."""
        from mlxrl.policy.adapter_folder import read
        from mlxrl.policy.lora import with_leaves

        best = step_folder(self.folder.best, self.selection.step)
        if not self._keeps_best or not best.is_dir():
            return self.policy.save(target)
        with with_leaves(self.policy.model, read(best).weights):
            return self.policy.save(target)

    def after(self) -> None:
        """Evaluate what adapters/ holds, as it is read from there, and compare it with the evaluation before."""
        from mlxrl.policy.adapter_folder import WEIGHTS, load_weights
        from mlxrl.train.comparison import Scores, compare

        if not self.experiment.held_out:
            return
        load_weights(self.policy.model, self.folder.adapters)
        step = self.selection.step if self._keeps_best else self.steps.state.step
        found = self._held_out(step, "after training")
        compared = compare(Scores.of_json(self.report["scores"]["before"]), found)
        digest = facts.digest(self.folder.adapters / WEIGHTS)
        self._record("after", step, found, state="done", **compared, adapter=digest)
        self._write()

    def lines(self) -> list[str]:
        """What came of data.validation, for people."""
        chosen, run = self.selection, self.experiment.config.run
        found: list[str] = []
        if self.stopped:
            found.append(f"ended     no improvement on data.validation in {run.patience} evaluations")
        if self._keeps_best and chosen.best is not None:
            place = f"after step {chosen.step}" if chosen.step else "before training"
            ((name, value),) = chosen.best.measure.items()
            found.append(f"best      {place}: {name.replace('_', ' ')} {value:.3f} on data.validation")
        return found

    @property
    def _keeps_best(self) -> bool:
        return self.experiment.config.run.keep == "best"

    @property
    def _takes_back(self) -> bool:
        return self.experiment.config.run.accept_margin is not None

    def _select(self, selection: Selection) -> None:
        self.steps.state.values["selection"] = selection.as_json()

    def _begun(self) -> dict[str, Any]:
        """What evaluation.json says before there are numbers, and what it has of the same evaluation already."""
        from mlxrl.train.comparison import Scores

        source = self.experiment.config.data.evaluation
        if source is None:
            return {"state": "not_run", "reason": "data.evaluation is left out"}
        made: dict[str, Any] = {
            "settings": self.experiment.evaluation_settings(),
            "examples": facts.data_digest(source, self.experiment.held_out),
        }
        known = self.folder.evaluation()
        kept: dict[str, Any] = {}
        if all(known.get(name) == plain(value) for name, value in made.items()):
            with suppress(KeyError, TypeError, ValueError, AttributeError):  # damaged, so it is made again
                before, scores = known["before"], known["scores"]["before"]
                if plain(Scores.of_json(scores).measure).items() <= before.items():
                    kept = {"before": before, "scores": {"before": scores}}
        return {"state": "begun", **made, **kept}

    def _has_chosen(self) -> bool:
        """Whether there is a best adapter, and on the disk whatever of it and of accepted ones this run wants."""
        chosen = self.selection
        wanted = [step_folder(self.folder.best, chosen.step)] if self._keeps_best else []
        wanted += [step_folder(self.folder.accepted, chosen.accepted)] if self._takes_back else []
        return chosen.best is not None and all(path.is_dir() for path in wanted)

    def _held_out(self, step: int, when: str) -> Evaluation:
        experiment, config = self.experiment, self.experiment.config
        with self.busy(f"evaluating {len(experiment.held_out):,} held-out examples"):
            found = experiment.evaluate(self.policy, experiment.held_out, step, config.evaluation.samples)
        summary = found.summary(config.evaluation.success)
        self._tell(summary, when)
        self.folder.event("evaluation", when=when, step=step, **summary)
        return found

    def _tell(self, summary: Mapping[str, Any], when: str = "before training") -> None:
        with self.folder.writing():
            for sink in self.sinks:
                sink.evaluation(when, summary)

    def _validate(self, when: str) -> bool:
        """Evaluate data.validation, and judge the adapter; whether it was taken back."""
        experiment, config, taken = self.experiment, self.experiment.config, self.steps.state.step
        with self.busy(f"evaluating {len(experiment.validation):,} examples of data.validation"):
            found = experiment.evaluate(self.policy, experiment.validation, taken)
        selection, verdict = self.selection.judged(taken, found.scores, config.run.accept_margin)
        summary = {**found.summary(config.evaluation.success), **verdict}
        with self.folder.writing():
            for sink in self.sinks:
                sink.validation(when, summary)
        self.folder.event("validation", when=when, step=taken, **summary)
        rejected = verdict.get("decision") == "rejected"
        if rejected:
            accepted = step_folder(self.folder.accepted, selection.accepted)
            self.steps.take_back(accepted, selection=selection.as_json())
        else:
            self._keep(selection)
            self._select(selection)
        self._write()
        return rejected

    def _keep(self, selection: Selection) -> None:
        """Keep this step as the last accepted one, and its adapter as the best, where it is that."""
        from mlxrl.train.checkpoint import found

        with self.folder.writing():
            if self._takes_back:
                self._clear(self.folder.accepted)
                self.steps.save(self.folder.accepted, keep=len(found(self.folder.accepted)) + 1)
            if self._keeps_best and not selection.since:
                self._clear(self.folder.best)
                self.policy.save(step_folder(self.folder.best, selection.step))

    def _clear(self, folder: Path) -> None:
        """Remove what is of steps that are taken again, and what no checkpoint refers to that the run may go on from.

        A checkpoint refers to the last one that is not later than itself.
        """
        from mlxrl.train.checkpoint import found, remove, step_of

        taken, there = self.steps.state.step, found(folder)
        oldest = min(map(step_of, found(self.folder.checkpoints)), default=taken)
        earlier = [one for one in there if step_of(one) <= oldest]
        remove({*earlier[:-1], *(one for one in there if step_of(one) >= taken)})

    def _record(self, name: str, step: int, found: Evaluation, **more: Any) -> None:
        summary = {"step": step, **found.summary(self.experiment.config.evaluation.success)}
        scores = {**self.report.get("scores", {}), name: found.scores.as_json()}
        self.report |= {name: summary, **more, "scores": scores}

    def _write(self) -> None:
        """Write evaluation.json; what is said of every example comes last."""
        chosen = self.selection
        if chosen.best is not None:
            made = {"best_step": chosen.step, **chosen.best.measure, "evaluations_since": chosen.since}
            self.report["validation"] = made
        last = {name: self.report.pop(name) for name in ("scores",) if name in self.report}
        self.report |= last
        self.folder.record_evaluation(self.report)


def step_folder(folder: Path, step: int) -> Path:
    """The folder in another one of what was after so many steps."""
    return folder / f"step-{step:06d}"


def due(every: int, done: int) -> bool:
    """Whether what is done every so many steps is due after so many; 0 is never."""
    return every > 0 and done % every == 0
