"""The life of a run: evaluate, train, checkpoint, states. What it does with the library a user could write too."""

from __future__ import annotations

import shlex
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mlxrl.awaiting import is_async
from mlxrl.errors import UserError
from mlxrl.rewards import RewardError
from mlxrl.rewards.scoring import failures_of
from mlxrl.runs import facts
from mlxrl.runs.experiment import Experiment
from mlxrl.runs.folder import RunFolder, near
from mlxrl.runs.memory_limits import without_effect
from mlxrl.runs.shutdown import Shutdown
from mlxrl.runs.sinks import Description, Outcome, Sink

if TYPE_CHECKING:
    from mlxrl.policy.policy import Policy
    from mlxrl.train.evaluate import Evaluation
    from mlxrl.train.loop import RunState
    from mlxrl.train.teacher import Teacher

Busy = Callable[[str], AbstractContextManager[None]]


@dataclass(slots=True)
class Run:
    """A run under way.

    policy, teacher: loaded before the folder is made, so that what cannot be had leaves none. sinks: what receives it.
    busy: the span of something that takes a while, shown to people. lines: what is said of it besides what the
    experiment says. state, evaluation: as far as they have come.
    """

    experiment: Experiment
    folder: RunFolder
    policy: Policy
    teacher: Teacher | None
    shutdown: Shutdown
    sinks: Sequence[Sink]
    busy: Busy
    lines: Sequence[tuple[str, str]] = ()
    state: RunState | None = None
    evaluation: dict[str, Any] = field(default_factory=dict[str, Any])

    def __call__(self) -> int:
        """Run, and leave the folder in the state it ended in. What was learned is saved, whatever ends it.

        Returns:
            the exit code. An error that the user can put right is raised, the folder's state recorded.
        """
        try:
            self.folder.enter("running")
            return self._run()
        except KeyboardInterrupt:
            kept = self._keep()
            self.folder.enter("interrupted")
            self._end("interrupted", [f"stopped at once; {self._adapter() if kept else 'nothing was learned yet'}"])
            return 130
        except BaseException as error:  # user code may raise anything
            self._end("failed")
            try:
                self._keep()
            finally:
                self.folder.failure(error)
            if isinstance(error, UserError):
                raise
            traceback.print_exception(error)
            return 1

    def _run(self) -> int:
        """Evaluate, train, save, and evaluate again."""
        policy, held_out = self.policy, self.experiment.held_out
        self._begin()
        evaluate = self.experiment.evaluator(policy)
        before = self._evaluate(evaluate, 0, "before training") if held_out else None
        if before is not None:
            self._record(before=before.summary(self.experiment.config.evaluation.success))
        with self.shutdown.graceful():
            self._train(policy, evaluate)
        policy.save(self.folder.adapters)
        if self.shutdown.requested:
            self.folder.enter("cancelled")
            self._end("cancelled", [f"stopped; {self._adapter()}"])
            return 130
        if before is not None:
            from mlxrl.train.evaluate import compare

            after = self._evaluate(evaluate, self.experiment.config.steps, "after training")
            self._record(after=after.summary(self.experiment.config.evaluation.success), **compare(before, after))
        self.folder.enter("succeeded")
        self._end("succeeded", self._next())
        return 0

    def _begin(self) -> None:
        """Record what the run is made of, and begin the sinks."""
        source, teacher = self.experiment.config.model.id, self.experiment.config.teacher.id
        self.folder.record(model={"id": source, "files": facts.model_digests(source)})
        if teacher not in (None, "base"):
            self.folder.record(teacher={"id": teacher, "files": facts.model_digests(teacher)})
        title = f"mlxrl {facts.versions()['mlxrl']}"
        lines = [*summary(self.experiment, self.policy.trainable_parameters), *self.lines]
        description = Description(title, lines, self.policy.adapted, self.experiment.config, self.folder.path)
        for sink in self.sinks:
            sink.begin(description)

    def _train(self, policy: Policy, evaluate: Callable[[int], Evaluation]) -> None:
        """Take the steps, up to the last one, or the one with a graceful-shutdown request."""
        from mlxrl.train import checkpoint
        from mlxrl.train.loop import RunState
        from mlxrl.train.optimizer import make_optimizer

        config = self.experiment.config
        updates = config.train.updates_per_rollout * config.train.minibatches
        self.state = state = RunState(make_optimizer(config.optimizer, config.steps, updates))
        for step in self.experiment.steps(policy, self.teacher, state):
            done = step.number
            if not step.metrics.get("updates") and not step.metrics.get("updates/skipped"):
                names = ("groups/sampled", "groups/used", "rollout/rounds")
                counts = {name: step.metrics[name] for name in names if name in step.metrics}
                self.folder.event("no signal", step=done, **counts)
            for failed in failures_of([one for group in step.sampled or step.groups for one in group]):
                self.folder.event("unscored", step=done, **asdict(failed))
            for sink in self.sinks:
                sink.step(step)
            if due(config.run.checkpoint_every, done):
                checkpoint.save(self.folder.checkpoint(done), policy, state)
            if self.shutdown.requested:
                return
            if self.experiment.held_out and due(config.run.evaluate_every, done) and done < config.steps:
                self._between(evaluate, done)

    def _evaluate(self, evaluate: Callable[[int], Evaluation], step: int, when: str) -> Evaluation:
        with self.busy(f"evaluating {len(self.experiment.held_out):,} held-out examples"):
            found = evaluate(step)
        summary = found.summary(self.experiment.config.evaluation.success)
        for sink in self.sinks:
            sink.evaluation(when, summary)
        self.folder.event("evaluation", when=when, **summary)
        return found

    def _between(self, evaluate: Callable[[int], Evaluation], done: int) -> None:
        """An evaluation between steps; the run lives where it could not be scored."""
        when = f"after step {done}"
        try:
            self._evaluate(evaluate, done, when)
        except RewardError as error:
            self.folder.event("evaluation failed", when=when, error=str(error))
            warnings.warn(f"evaluation {when}: {error}", stacklevel=2)

    def _record(self, **found: Any) -> None:
        self.evaluation |= found
        self.folder.evaluation(self.evaluation)

    def _keep(self) -> bool:
        """Save what was learned so far; whether there is something."""
        state = self.state
        updated = state is not None and bool(state.optimizer.step > 0)
        if updated:
            self.policy.save(self.folder.adapters)
        return updated

    def _adapter(self) -> str:
        return f"the adapter so far is in {near(self.folder.adapters)}"

    def _end(self, state: str, lines: Sequence[str] = ()) -> None:
        for sink in self.sinks:
            sink.end(Outcome(state, self.evaluation, lines))

    def _next(self) -> list[str]:
        model, adapters = near(self.experiment.config.model.id), near(self.folder.adapters)
        if model.endswith(".gguf"):
            return [f"adapter   {adapters}"]
        words = shlex.join(["mlx_lm.generate", "--model", model, "--adapter-path", adapters, "--prompt"])
        return [f"adapter   {adapters}", f"try it    {words} ..."]


def due(every: int, done: int) -> bool:
    """Whether what is done every so many steps is due after so many; 0 is never."""
    return every > 0 and done % every == 0


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
        (
            "reward",
            ", ".join(map(_reward, config.reward.functions, experiment.rewards.functions))
            or ("" if learned else "none"),
        ),
        ("algorithm", f"{experiment.algorithm.name}({arguments})"),
        ("teacher", _teacher(experiment)),
        ("a step", f"{'answers of ' + times(rollout.tasks_per_step, 'example') if learned else sampled}, {updates}"),
        ("memory", without_effect(config.memory)),
        ("a run", f"{config.steps} steps{_evaluations(experiment)}, in {near(config.run.folder or '')}"),
    ]
    return [(label, value) for label, value in lines if value]


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
    if not experiment.held_out:
        return ", no evaluation"
    config = experiment.config
    between = (config.steps - 1) // config.run.evaluate_every if config.run.evaluate_every else 0
    return f", {2 + between} evaluations of {times(len(experiment.held_out), 'example')}"


def times(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
