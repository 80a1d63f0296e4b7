"""What a config means: data, algorithm, rewards, environment, sinks, built once before a run; then its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mlxrl import algo, plugins
from mlxrl.algo.algorithm import turns_of
from mlxrl.checked import SettingError
from mlxrl.config import Origin, text
from mlxrl.data import tasks as read_tasks
from mlxrl.errors import UserError, did_you_mean
from mlxrl.protocols import Algorithm
from mlxrl.rewards import TrainerState
from mlxrl.rewards.scoring import Rewards, check_columns, rewards_of, tell_missing
from mlxrl.rollout.environment import Factory, check_factory, gives_rewards
from mlxrl.runs.sinks import Sink, UserSink
from mlxrl.settings import EpisodeLimits, Rollout, Sampling
from mlxrl.tables import Config
from mlxrl.train.check import check_reference, check_run, check_tasks
from mlxrl.types import Task

if TYPE_CHECKING:
    from mlxrl.policy.policy import Policy
    from mlxrl.rollout.demonstrations import Rules
    from mlxrl.train.evaluate import Evaluation
    from mlxrl.train.step import Steps
    from mlxrl.train.teacher import Teacher

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run before its models are loaded.

    table: of the algorithm, resolved; held_out: the examples to evaluate on, none without data.evaluation.
    """

    config: Config
    origin: Origin
    algorithm: Algorithm
    table: Mapping[str, Any]
    rewards: Rewards
    environment: Factory | None
    tasks: tuple[Task, ...]
    held_out: tuple[Task, ...]
    sinks: tuple[Sink, ...]

    @classmethod
    def of(cls, settings: Config, origin: Origin) -> Experiment:
        """Build everything that can be built without a model; ConfigError for the first fault."""
        try:
            settings = _with_adapter(settings)
            algorithm = _within((), algo.build, settings.algorithm)
            rewards, environment = rewards_of(settings.reward), _environment(settings)
            rewarded = bool(rewards.functions) or gives_rewards(environment)
            check_run(
                algorithm, steps=settings.steps, rollout=settings.rollout, sampling=settings.sampling,
                reward=settings.reward, train=settings.train, warmup_steps=settings.optimizer.warmup_steps,
                rewarded=rewarded, episodes=environment is not None,
                sampled=rewarded and settings.data.evaluation is not None,
            )  # fmt: skip
            _check_data_settings(settings, rewarded, algorithm)
            check_reference(settings.model, algorithm)
            _check_echo(settings, algorithm)
            _check_teacher(settings, algorithm)
        except UserError as error:
            raise origin.locate(error) from error.__cause__
        data = settings.data
        whole, most = "answers" in algorithm.needs, settings.evaluation.examples
        tasks = _tasks(settings, data.train, None, whole)
        held_out = [] if data.evaluation is None else _tasks(settings, data.evaluation, most, whole)
        try:
            _check_data(settings, rewards, (held_out,) if whole else (tasks, held_out), tasks)
            check_tasks(len(tasks), settings.rollout, f"examples of {data.train}")
            sinks = tuple(_sink(name) for name in settings.run.sinks)
        except UserError as error:
            raise origin.locate(error) from error.__cause__
        return cls(
            settings, origin, algorithm, _table(settings, algorithm), rewards, environment, tuple(tasks),
            tuple(held_out), sinks,
        )  # fmt: skip

    @property
    def completed(self) -> tuple[Task, ...]:
        """The examples that the model completes: those of evaluations alone, where it learns from answers."""
        return self.held_out if "answers" in self.algorithm.needs else self.tasks

    def within(self, folder: Path) -> Experiment:
        """The same with the folder of its run."""
        config = self.config
        return replace(self, config=replace(config, run=replace(config.run, folder=str(folder))))

    def toml_in(self, folder: Path) -> str:
        """The resolved config of a run in a folder."""
        return self.within(folder).toml()

    def toml(self) -> str:
        """The resolved config: every setting and every argument of the algorithm."""
        return text(self.config, self.table)

    def load(self, *, trained: bool = True, adapter: str | None = None) -> Policy:
        """The model with the adapters that are trained, with saved ones, or as it is.

        Raises:
            UserError: it cannot be had, or its template or tokenizer does not take the prompts or the sampling.
        """
        from mlxrl.policy.policy import load
        from mlxrl.rollout.demonstrations import learnable
        from mlxrl.rollout.sample import fitting_prompts
        from mlxrl.rollout.stop_rules import rules_of

        model = self.config.model
        lora, adapter = (self.config.lora, model.adapter) if trained else (None, adapter)
        policy = load(
            model.id, lora=lora, dtype=model.dtype, adapter=adapter, reference=model.reference, seed=self.config.seed
        )
        rules_of(policy.tokenizer, self.config.sampling)
        learned = self.learned(policy.model)
        for some in (self.tasks if trained else (), self.held_out):
            if some and learned is not None:
                learnable(policy, some, learned)
            elif some:
                fitting_prompts(policy, some, self.config.sampling, self.environment)
        return policy

    def learned(self, model: Any) -> Rules | None:
        """How examples become what an algorithm learns that learns from answers; None for one that samples."""
        from mlxrl.rollout.demonstrations import rules_for

        turns, config = turns_of(self.algorithm), self.config
        return turns and rules_for(model, turns, config.sampling.thinking, config.train.max_tokens_per_sequence)

    def teacher(self, policy: Policy) -> Teacher | None:
        """The teacher of a policy, its model loaded where it has one of its own; None for an algorithm without one.

        Raises:
            UserError: it cannot be had, or has another vocabulary.
        """
        from mlxrl.policy.policy import load
        from mlxrl.train.teacher import Teacher, teacher_of

        given = self.config.teacher
        if "teacher" not in self.algorithm.needs:
            return None
        own = given.id not in (None, "base")
        loaded = load(given.id or "", lora=None, dtype=given.dtype, adapter=given.adapter) if own else None
        teacher = Teacher(loaded, base=given.id == "base", hint=given.hint, thinking=given.thinking)
        return teacher_of(policy, self.algorithm, teacher)

    def limits(self) -> EpisodeLimits:
        """What an episode may take."""
        given = self.config.environment
        return EpisodeLimits(**{one.name: getattr(given, one.name) for one in fields(EpisodeLimits)})

    def steps(self, policy: Policy, teacher: Teacher | None, resume: Path | None = None) -> Steps:
        """The steps of training, from a checkpoint on where there is one, each taken when it is asked for."""
        from mlxrl.train.loop import run

        config = self.config
        given: dict[str, Any] = {
            "reward": replace(config.reward, functions=self.rewards.functions), "environment": self.environment,
            "rollout": config.rollout, "sampling": config.sampling, "limits": self.limits(),
        }  # fmt: skip
        if "answers" in self.algorithm.needs:  # the rest is that of evaluations
            sampling = Sampling(thinking=config.sampling.thinking)
            given = {"rollout": Rollout(tasks_per_step=config.rollout.tasks_per_step), "sampling": sampling}
        return run(
            policy, self.tasks, self.algorithm, teacher=teacher, steps=config.steps, train=config.train,
            optimizer=config.optimizer, seed=config.seed, resume=resume, **given,
        )  # fmt: skip

    def evaluator(self, policy: Policy) -> Callable[[int], Evaluation]:
        """What evaluates a policy on the held-out examples after so many steps, as it is when called."""
        from mlxrl.train.evaluate import evaluate

        temperature = self.config.evaluation.temperature
        sampling = replace(self.config.sampling, temperature=temperature, top_p=1.0, top_k=0, min_p=0.0)
        return lambda step: evaluate(
            policy, self.held_out, self.rewards, sampling=sampling, environment=self.environment,
            limits=self.limits(), max_rows=self.config.rollout.max_rows, seed=self.config.seed,
            state=TrainerState(step, self.config.steps), turns=turns_of(self.algorithm), train=self.config.train,
        )  # fmt: skip


def _within(where: tuple[str, ...], function: Callable[..., T], *arguments: Any) -> T:
    """Call a function; its fault is one of a setting."""
    try:
        return function(*arguments)
    except UserError as error:
        raise SettingError(*where, *error.parts) from error.__cause__


def _table(settings: Config, algorithm: Algorithm) -> Mapping[str, Any]:
    """The table that makes the algorithm again, with every argument of a recipe.

    TOML has no None. Where an argument is None by a convention, the convention's name says so.
    """
    given = settings.algorithm
    if ":" in given.get("name", ""):
        return given
    kept = {name: given[name] for name in ("convention",) if name in given}
    return {"name": algorithm.name, **kept, **algo.arguments_of(algorithm)}


def _with_adapter(settings: Config) -> Config:
    """The config with the [lora] table of the adapter that it goes on from."""
    if settings.model.adapter is None:
        return settings
    from mlxrl.policy.adapter_folder import read, taken_over

    return replace(settings, lora=taken_over(settings.lora, read(settings.model.adapter)))


def _environment(settings: Config) -> Factory | None:
    """What makes the environments of episodes, None where the config names nothing."""
    given = settings.environment
    if given.factory is None:
        return None
    factory = _within(("environment", "factory"), plugins.find, given.factory)
    _within(("environment",), check_factory, factory, given.arguments)
    return plugins.Copying(factory, **given.arguments)


def _sink(name: str) -> Sink:
    return _within(("run", "sinks"), UserSink, name, _within(("run", "sinks"), plugins.find, name))


def _tasks(settings: Config, source: str, limit: int | None, whole: bool) -> list[Task]:
    data: Any = settings.data
    columns = {**({} if data.completion is None else {"completion": data.completion}), **data.columns}
    return read_tasks(source, data.prompt, system=data.system, limit=limit, whole=whole, **columns)


def _check_data_settings(settings: Config, rewarded: bool, algorithm: Algorithm) -> None:
    """SettingError for settings of data and evaluation that do not go together."""
    data, learned = settings.data, "answers" in algorithm.needs
    if taken := [name for name in data.columns if name in ("source", "prompt", "system", "limit", "whole")]:
        raise SettingError("data", "columns", f"{taken[0]!r} is a name that is taken; rename the column to another")
    if data.evaluation == data.train:
        raise SettingError("data", "evaluation", "wanted examples that are not trained on, got the training data")
    if data.completion is not None and not learned:
        raise SettingError("data", "completion", f"has no effect, because {algorithm.name} learns from samples")
    if data.completion is not None and "completion" in data.columns:
        raise SettingError("data", "columns", "'completion' is data.completion; leave one of them out")
    if data.evaluation is not None and not rewarded and not learned:
        raise SettingError("reward", "wanted at least one function, got none; data.evaluation is scored by them")
    if data.evaluation is None:
        given = [("evaluation", one.name) for one in fields(settings.evaluation)
                 if getattr(settings.evaluation, one.name) != one.default]  # fmt: skip
        for where in given + [("run", "evaluate_every")] * (settings.run.evaluate_every > 0):
            raise SettingError(*where, "has no effect without data.evaluation")


def _check_echo(settings: Config, algorithm: Algorithm) -> None:
    if "observations" in algorithm.needs and settings.environment.max_turns == 1:
        raise SettingError("algorithm", "echo", "has no effect with environment.max_turns = 1: no answer is read")
    if "observations" in algorithm.needs and settings.environment.factory is None:
        raise SettingError("algorithm", "echo", "has no effect without environment.factory")


def _check_teacher(settings: Config, algorithm: Algorithm) -> None:
    teacher, needed = settings.teacher, "teacher" in algorithm.needs
    given = teacher.id is not None or teacher.hint is not None
    if given and not needed:
        raise SettingError("teacher", f"has no effect, because {algorithm.name} does not learn from a teacher")
    if needed and not given:
        why = f"{algorithm.name} needs a teacher; wanted a table [teacher] with id or hint"
        raise SettingError("algorithm", "name", why)
    if teacher.id == "base" and teacher.hint is None and "reward" not in algorithm.needs:
        why = "'base' is what training starts from, so nothing is learned; wanted a hint, or algorithm.reward"
        raise SettingError("teacher", "id", why)
    if teacher.hint is not None and settings.environment.factory is not None:
        raise SettingError("teacher", "hint", "an environment writes the prompts; leave the hint out")


def _check_data(settings: Config, rewards: Rewards, scored: Sequence[Sequence[Task]], tasks: Sequence[Task]) -> None:
    """SettingError for columns that rewards want of what they score, or the teacher of tasks, and the data lack."""
    if len(scored) == 1 and rewards.functions:  # which score the answers of the model beside those of the data
        from mlxrl.rollout.demonstrations import all_asked

        all_asked(scored[0])
    for some in scored:
        if some:
            offered = list(dict.fromkeys(column for task in some for column in task.columns))
            _within(("reward",), check_columns, rewards, offered)
            tell_missing(rewards, some)
    if (hint := settings.teacher.hint) is not None:
        from mlxrl.train.teacher import hinted

        if hint not in tasks[0].columns:
            near = did_you_mean(hint, tasks[0].columns) or f"; there are {', '.join(tasks[0].columns)}"
            raise SettingError("teacher", "hint", f"no column {hint!r} in {settings.data.train}{near}")
        for task in tasks:
            hinted(task, hint)
