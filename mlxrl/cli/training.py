"""`mlxrl train`: a run from its config to its folder."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrl import config
from mlxrl.cli import compose, plan
from mlxrl.cli.main import fault
from mlxrl.config import Config
from mlxrl.rewards import RewardError
from mlxrl.rollout.chat import PromptError
from mlxrl.rollout.environment import EpisodeError
from mlxrl.runs import facts
from mlxrl.runs.folder import RunFolder, create, free_folder, refuse_taken
from mlxrl.runs.stop import Stop
from mlxrl.show.console import Console
from mlxrl.train import checkpoint
from mlxrl.train.evaluate import Evaluation, compare
from mlxrl.train.loop import Diverged
from mlxrl.types import Task

if TYPE_CHECKING:
    from mlxrl.policy.load import Policy
    from mlxrl.train.teacher import Teacher


def command(settings: Config, name: str, line: Sequence[str], *, dry_run: bool = False) -> int:
    """Train as a config says, or say what that would be.

    Args:
        name: of the run, where the config has no folder for it; line: the command line, for the manifest.
    """
    folder = Path(settings.run.folder or free_folder(Path("runs") / name)).expanduser()
    refuse_taken(folder)
    settings = replace(settings, run=replace(settings.run, folder=str(folder)))
    training, heldout = compose.training_rows(settings), compose.heldout_rows(settings)
    settings, chosen = plan.settled(settings, training)
    if dry_run:
        return _dry_run(settings, training, heldout, chosen)
    with Stop().listening() as stop:
        made = create(folder, config.text(settings))
        run = Run(settings, training, heldout, made, stop, Console(settings.steps), chosen=chosen)
        run.describe(line)
        return run.guarded()


def _dry_run(settings: Config, training: Sequence[Task], heldout: Sequence[Task], chosen: str) -> int:
    """Print the resolved config and, as comments in it, what would be done."""
    from mlxrl.policy.load import outline

    lines = outline(settings.model.id, compose.adapters(settings))
    print(config.text(settings))
    for label, value in compose.outlined(settings, training, heldout):
        print(f"# {label}: {value}")
    if lines is None:
        print(f"# adapted: known once {settings.model.id} is on this machine")
    for line in lines or ():
        shape = " x ".join(map(str, line.shape))
        print(f"# adapted: {line.key} ({line.layer} {shape}), {line.count} times, {line.parameters:,} parameters")
    for found in plan.told(settings, training, chosen):
        print(f"# memory: {found}")
    return 0


class Fault(Exception):
    """Something for the user to put right, in one line."""


@dataclass(slots=True)
class Run:
    """A run on its way; the policy and the evaluation come as it goes. chosen: how the size of a pass was."""

    settings: Config
    training: list[Task]
    heldout: list[Task]
    folder: RunFolder
    stop: Stop
    console: Console
    chosen: str = ""
    policy: Policy | None = None
    teacher: Teacher | None = None
    evaluation: dict[str, Any] = field(default_factory=dict[str, Any])

    def describe(self, line: Sequence[str]) -> None:
        """Put into the manifest what is known before a model is loaded."""
        data = self.settings.data
        digests = [facts.data_digest(data.train, self.training)]
        if data.evaluation is not None:
            digests.append(facts.data_digest(data.evaluation, self.heldout))
        self.folder.record(
            command=["mlxrl", "train", "--config", *line],
            seed=self.settings.seed,
            versions=facts.versions(),
            device=facts.device(),
            data=digests,
        )

    def guarded(self) -> int:
        """Run, and leave the folder in the state it ended in. What was learned is saved, whatever ends it."""
        try:
            self.folder.enter("running")
            with plan.limited(self.settings):
                return self._run(self._load())
        except KeyboardInterrupt:
            self._keep()
            self.folder.enter("interrupted")
            return 130
        except (Fault, RewardError, Diverged, PromptError, EpisodeError) as error:
            self._failed(error)
            return fault(error)
        except Exception as error:  # noqa: BLE001  (the folder has to say that the run failed, whatever it was)
            self._failed(error)
            traceback.print_exception(error)
            return 1
        finally:
            self.console.close()

    def _failed(self, error: Exception) -> None:
        self.console.close()
        try:
            self._keep()
        finally:
            self.folder.failure(error)

    def _keep(self) -> None:
        """Save what was learned so far, if there is something."""
        if self.policy is not None:
            self.policy.save(self.folder.adapters)

    def _load(self) -> Policy:
        """Load the model. A ValueError here is for the user to put right; in training it would be an error of ours."""
        try:
            with self.console.busy(f"loading {compose.near(self.settings.model.id)}"):
                self.policy = compose.policy(self.settings, self.training, trained=True)
                self.teacher = compose.teacher(self.settings, self.policy)
        except (ValueError, OSError) as error:
            raise Fault(str(error)) from error
        source = self.settings.model.id
        self.folder.record(model={"id": source, "files": facts.model_digests(source)})
        if (judge := self.settings.teacher.id) not in (None, "base"):
            self.folder.record(teacher={"id": judge, "files": facts.model_digests(judge)})
        return self.policy

    def _run(self, policy: Policy) -> int:
        """Evaluate, train, save, and evaluate again."""
        judge = compose.judge(self.settings, policy, self.heldout)
        self._introduce(policy)
        before = self._evaluate(judge, "before training") if self.heldout else None
        if before is not None:
            self._record(before=before.summary(self.settings.evaluation.success))
        self.console.start()
        with self.stop.patiently():
            self._train(policy, judge)
        policy.save(self.folder.adapters)
        if self.stop.asked:
            return self._cancelled()
        if before is not None:
            after = self._evaluate(judge, "after training")
            self._record(after=after.summary(self.settings.evaluation.success), **compare(before, after))
        self.folder.enter("succeeded")
        self.console.finish(self.evaluation, self._next())
        return 0

    def _train(self, policy: Policy, judge: Callable[[], Evaluation]) -> None:
        """Take the steps, up to the last one or the one in which the run was asked to stop."""
        every, optimizer = self.settings.run, compose.optimizer(self.settings)
        for step in compose.steps(self.settings, policy, self.training, optimizer, self.teacher):
            done = step.index + 1
            self.folder.metrics(done, step.metrics)
            if not step.metrics["policy/updates"] and not step.metrics["policy/skipped"]:
                drawn = {name: step.metrics[name] for name in ("groups/total", "groups/kept", "rollout/draws")}
                self.folder.event("no signal", step=done, **drawn)
            self.folder.samples(done, step.groups)
            self.console.step(step)
            if _due(every.samples_every, done) and step.groups:
                self.console.samples(step.groups)
            if _due(every.checkpoint_every, done):
                checkpoint.save(self.folder.checkpoint(done), policy, optimizer, done)
            if self.stop.asked:
                return
            if self.heldout and _due(every.evaluate_every, done) and done < self.settings.steps:
                self._evaluate(judge, f"after step {done}")

    def _introduce(self, policy: Policy) -> None:
        lora = self.settings.lora
        adapters = f"LoRA rank {lora.rank}, scale {lora.scale:g}: {policy.trainable_parameters:,} trainable parameters"
        pairs = compose.outlined(self.settings, self.training, self.heldout)
        pairs += [("a pass", f"at most {self.chosen}")] if self.chosen else []
        self.console.header(f"mlxrl {facts.versions()['mlxrl']}", [pairs[0], ("adapters", adapters), *pairs[1:]])
        self.console.adapted(policy.adapted)

    def _evaluate(self, judge: Callable[[], Evaluation], when: str) -> Evaluation:
        with self.console.busy(f"evaluating {len(self.heldout):,} held-out rows"):
            found = judge()
        summary = found.summary(self.settings.evaluation.success)
        self.console.evaluation(when, summary)
        self.folder.event("evaluation", when=when, **summary)
        return found

    def _record(self, **found: Any) -> None:
        self.evaluation |= found
        self.folder.evaluation(self.evaluation)

    def _cancelled(self) -> int:
        self.folder.enter("cancelled")
        self.console.close()
        self.console.note(f"stopped; the adapter so far is in {self.folder.adapters}")
        return 130

    def _next(self) -> list[str]:
        model, adapters = compose.near(self.settings.model.id), self.folder.adapters
        if model.endswith(".gguf"):
            return [f"adapter   {adapters}"]
        words = shlex.join(["mlx_lm.generate", "--model", model, "--adapter-path", str(adapters), "--prompt"])
        return [f"adapter   {adapters}", f"try it    {words} ..."]


def _due(every: int, done: int) -> bool:
    return every > 0 and done % every == 0
