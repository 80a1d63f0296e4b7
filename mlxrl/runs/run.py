"""The life of a run: evaluate, train, checkpoint, states. What it does with the library a user could write too."""

from __future__ import annotations

import shlex
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mlxrl.awaiting import is_async
from mlxrl.errors import UserError, one_line
from mlxrl.rewards.scoring import failures_of
from mlxrl.runs import facts, handoff
from mlxrl.runs.evaluations import Busy, Evaluations, due
from mlxrl.runs.experiment import Experiment
from mlxrl.runs.folder import FolderError, RunFolder, claim_free, near
from mlxrl.runs.memory_limits import without_effect
from mlxrl.runs.shutdown import Shutdown
from mlxrl.runs.sinks import Description, Outcome, Sink
from mlxrl.text import safe, times

if TYPE_CHECKING:
    from mlxrl.policy.policy import Policy
    from mlxrl.train.checkpoint import Checkpoint
    from mlxrl.train.step import Step, Steps
    from mlxrl.train.teacher import Teacher


@dataclass(slots=True)
class Run:
    """A run under way.

    policy, teacher: loaded before the folder is made, so that what cannot be had leaves none. sinks: what receives it.
    busy: the span of something that takes a while, shown to people. lines: its description besides that of the
    experiment. start: where it goes on, None for a run from its beginning. steps, evaluations: as far as they
    have come. manifest: as the run began.
    """

    experiment: Experiment
    folder: RunFolder
    policy: Policy
    teacher: Teacher | None
    shutdown: Shutdown
    sinks: Sequence[Sink]
    busy: Busy
    lines: Sequence[tuple[str, str]] = ()
    start: Checkpoint | None = None
    steps: Steps | None = None
    evaluations: Evaluations | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __call__(self) -> int:
        """Run, and leave the folder in the state it ended in. What was learned is saved, whatever ends it.

        Returns:
            the exit code.
        """
        try:
            self.folder.enter("running")
            return self._run()
        except KeyboardInterrupt:
            with self.shutdown.held():
                return self._stopped()
        except BaseException as error:  # noqa: BLE001  (user code may raise anything)
            with self.shutdown.held():
                return self._failed(error)

    def _run(self) -> int:
        """Evaluate, train, save, and evaluate the result."""
        self._begin()
        resume = None if self.start is None else self.start.folder
        self.steps = iter(self.experiment.steps(self.policy, self.teacher, resume))
        evaluations = Evaluations(self.experiment, self.folder, self.policy, self.steps, self.sinks, self.busy)
        self.evaluations = evaluations
        evaluations.before()
        with self.shutdown.graceful():
            self._train(self.steps, evaluations)
        unmoved = self._unmoved()
        lines = self._keep()
        if self.shutdown.requested:
            lines = [*self._hand_over(), *lines]
            self.folder.enter("cancelled", reason=self.shutdown.reason)
            self._end("cancelled", ["stopped", *unmoved, *lines])
            return 130
        evaluations.after()
        stored = self._hand_over()
        self.folder.enter("succeeded")
        self._end("succeeded", [*unmoved, *evaluations.lines(), *self._result(), *stored])
        return 0

    def _begin(self) -> None:
        """Record what the run is made of, and begin the sinks."""
        model, teacher = self.experiment.config.model, self.experiment.config.teacher.id
        with self.folder.writing():
            self.folder.record(model=facts.model(model.id), parent=handoff.parent_of(model.adapter))
            if teacher not in (None, "base"):
                self.folder.record(teacher=facts.model(teacher))
        self.manifest = self.folder.manifest()
        title = f"mlxrl {facts.versions()['mlxrl']}"
        lines = [*summary(self.experiment, self.policy.trainable_parameters), *self.lines]
        description = Description(title, lines, self.policy.adapted, self.experiment.config, self.folder.path)
        with self.folder.writing():
            for sink in self.sinks:
                sink.begin(description)

    def _train(self, steps: Steps, evaluations: Evaluations) -> None:
        """Take the steps, up to the last one, or the one with a graceful-shutdown request, or that ends it early."""
        config, saved = self.experiment.config, time.monotonic()
        if not evaluations.after_step():
            return
        for step in steps.recorded(self._write):
            self.shutdown.ask(self.folder.cancel_asked())
            ended = not self.shutdown.requested and not evaluations.after_step()
            late = 0 < config.run.checkpoint_minutes * 60 <= time.monotonic() - saved
            if late or due(config.run.checkpoint_every, step.number):
                self._checkpoint()
                saved = time.monotonic()
            if self.shutdown.requested or ended:
                return

    def _unmoved(self) -> list[str]:
        """A line where all adapter weights are those of the start."""
        if self.policy.distance:
            return []
        self.folder.event("unmoved", step=self._taken)
        return [f"unmoved   {times(self._taken, 'step')} changed no weight: the adapter is what it was at the start"]

    def _write(self, step: Step) -> None:
        """Hand a step to the sinks, and note what went wrong in it."""
        if not step.metrics.get("updates") and not step.metrics.get("updates/skipped"):
            names = ("groups/sampled", "groups/used", "rollout/rounds")
            counts = {name: step.metrics[name] for name in names if name in step.metrics}
            self.folder.event("no signal", step=step.number, **counts)
        for failed in failures_of([one for group in step.sampled or step.groups for one in group]):
            self.folder.event("unscored", step=step.number, **asdict(failed))
        with self.folder.writing():
            for sink in self.sinks:
                sink.step(step)

    def _checkpoint(self) -> None:
        assert self.steps is not None
        with self.folder.writing():
            self.steps.save(self.folder.checkpoints, self.experiment.config.run.checkpoints)

    def _keep(self) -> list[str]:
        """Save the steps so far, as a checkpoint and as adapters; where they lie, and the command that goes on."""
        if self.steps is not None:
            self.steps.rewind()
        if self.evaluations is None or not self._taken:
            return []
        self._checkpoint()
        with self.folder.writing():
            self.evaluations.save(self.folder.adapters)
        return [f"adapter     {near(self.folder.adapters)}", self._go_on()]

    @property
    def _taken(self) -> int:
        return 0 if self.steps is None else self.steps.state.step

    def _hand_over(self) -> list[str]:
        """Write down what the adapter is, which is final, and put it into the store where the config says so."""
        if self.steps is None or self.steps.state.step == 0:
            return []
        with self.folder.writing():
            handoff.write(self.folder, self.experiment.algorithm.name, self.steps.state.step)
        stored = handoff.keep(self.folder) if self.experiment.config.run.store else ""
        return [f"stored    {stored}"] if stored else []

    def _stopped(self) -> int:
        """The end of a run that was stopped at once."""
        try:
            lines = self._keep() or ["nothing was learned yet"]
            self.folder.enter("interrupted", reason=self.shutdown.reason)
        except UserError as error:
            return self._failed(error)
        self._end("interrupted", ["stopped at once", *lines])
        return 130

    def _failed(self, error: BaseException) -> int:
        """The end of a run that failed: what was learned is kept, if need be in another folder."""
        lines = self._rescued()
        with suppress(FolderError):
            self.folder.failure(error)
        if isinstance(error, UserError):
            print(f"mlxrl: {safe(one_line(error))}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        self._end("failed", lines)
        return error.exit_code if isinstance(error, UserError) else 1

    def _rescued(self) -> list[str]:
        """Keep what was learned, in a folder beside that of the run where that has gone; what to do next."""
        try:
            return self._keep()
        except FolderError:
            if self.folder.path.is_dir():
                return [self._go_on()]
        except UserError:  # the state of the user's algorithm cannot be had; the adapters can
            with suppress(UserError), self.folder.writing():
                assert self.evaluations is not None
                self.evaluations.save(self.folder.adapters)
            return [self._go_on()]
        beside = self.folder.path.with_name(f"{self.folder.path.name}-rescued")
        with suppress(UserError, OSError):
            self.folder = claim_free(beside, self.experiment.toml_in)
            self.folder.record(**self.manifest)
            return self._keep()
        return ["what was learned could not be saved"]

    def _go_on(self) -> str:
        return f"go on with  {self.folder.resume_command}"

    def _end(self, state: str, lines: Sequence[str] = ()) -> None:
        report = {} if self.evaluations is None else self.evaluations.report
        for sink in self.sinks:
            with suppress(OSError):
                sink.end(Outcome(state, report, lines))

    def _result(self) -> list[str]:
        """Where the adapter is, and how it is tried."""
        model, adapters = near(self.experiment.config.model.id), near(self.folder.adapters)
        if model.endswith(".gguf"):
            return [f"adapter   {adapters}"]
        words = shlex.join(["mlx_lm.generate", "--model", model, "--adapter-path", adapters, "--prompt"])
        return [f"adapter   {adapters}", f"try it    {words} ..."]


def summary(experiment: Experiment, trainable: int | None = None) -> list[tuple[str, str]]:
    """What a run is and does, as labelled lines for people. trainable: parameters, where the model is loaded."""
    config, table = experiment.config, experiment.table
    rollout, train, lora = config.rollout, config.train, config.lora
    count, learned = rollout.tasks_per_step * rollout.group_size, "answers" in experiment.algorithm.needs
    turns = " a turn" if experiment.environment is not None else ""
    rounds = f", at most {times(rollout.resampling_rounds, 'resampling round')}" if rollout.resampling_rounds else ""
    held_out = (
        f"; held out {len(experiment.held_out):,} of {near(config.data.evaluation)}" if config.data.evaluation else ""
    )
    arguments = ", ".join(f"{name}={value!r}" for name, value in table.items() if name != "name" and value is not None)
    parameters = f": {trainable:,} trainable parameters" if trainable else ""
    kind = "DoRA" if lora.dora else "LoRA"
    start = f", from {near(config.model.adapter)}" if config.model.adapter else ""
    sampled = (
        f"{rollout.tasks_per_step} prompts x {rollout.group_size} completions = {count} completions of at most "
        f"{config.sampling.max_tokens} tokens{turns}{rounds}"
    )
    updates = times(train.updates_per_rollout * train.minibatches, "update")
    lines = [
        ("model", f"{near(config.model.id)}{f' ({config.model.dtype})' if config.model.dtype else ''}"),
        ("adapters", f"{kind} rank {lora.rank}, scale {lora.scale:g}{parameters}{start}"),
        ("data", f"{len(experiment.tasks):,} examples of {near(config.data.train)}{held_out}"),
        ("environment", _environment(experiment)),
        ("reward", _rewards(experiment)),
        ("algorithm", f"{experiment.algorithm.name}({arguments})"),
        ("teacher", _teacher(experiment)),
        ("a step", f"{'answers of ' + times(rollout.tasks_per_step, 'example') if learned else sampled}, {updates}"),
        ("memory", without_effect(config.memory)),
        ("a run", f"{config.steps} steps{_evaluations(experiment)}, in {near(config.run.folder or '')}"),
    ]
    return [(label, value) for label, value in lines if value]


def _rewards(experiment: Experiment) -> str:
    named = map(_reward, experiment.config.reward.functions, experiment.rewards.functions)
    return ", ".join(named) or ("" if "answers" in experiment.algorithm.needs else "none")


def _reward(name: object, function: object) -> str:
    return f"{near(str(name))}{' (async)' if is_async(function) else ''}"


def _environment(experiment: Experiment) -> str:
    given = experiment.config.environment
    if given.factory is None:
        return ""
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.arguments.items())
    most = "" if given.max_episode_tokens is None else f", at most {given.max_episode_tokens} tokens an episode"
    return f"{near(given.factory)}({arguments}), at most {times(given.max_turns, 'turn')}{most}"


def _teacher(experiment: Experiment) -> str:
    teacher = experiment.config.teacher
    if "teacher" not in experiment.algorithm.needs:
        return ""
    name = {None: "the model itself", "base": "the model without adapters"}.get(teacher.id, near(teacher.id or ""))
    adapter = f" with {near(teacher.adapter)}" if teacher.adapter else ""
    return f"{name}{adapter}{f', with the hint {teacher.hint}' if teacher.hint else ''}"


def _evaluations(experiment: Experiment) -> str:
    steps, every, examples = experiment.config.steps, experiment.config.run.evaluate_every, len(experiment.held_out)
    between = (steps - 1) // every if every else 0
    held_out = f", {2 + between} evaluations of {times(examples, 'example')}" if examples else ", no evaluation"
    chosen = f", {2 + between} of data.validation" if experiment.validation else ""
    return held_out + chosen
