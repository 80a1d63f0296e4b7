"""What a config means: data, algorithm, rewards, environment, sinks, built once before a run; then its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mlxrl import algo, plugins, store
from mlxrl.algo.algorithm import turns_of
from mlxrl.checked import SettingError
from mlxrl.config import Origin, resolved, text
from mlxrl.data import tasks as read_tasks
from mlxrl.errors import UserError
from mlxrl.protocols import Algorithm
from mlxrl.rewards import TrainerState
from mlxrl.rewards.scoring import Rewards, rewards_of
from mlxrl.rollout.environment import Factory, check_factory, gives_rewards
from mlxrl.runs.check import check_columns_of, check_echo, check_sources, check_teacher, check_validation
from mlxrl.runs.sinks import Sink, UserSink
from mlxrl.settings import EpisodeLimits, Rollout, Sampling
from mlxrl.tables import Config
from mlxrl.train.check import check_reference, check_run, check_tasks
from mlxrl.types import Task

if TYPE_CHECKING:
    from mlxrl.policy.policy import Policy
    from mlxrl.rollout.chat import Fitting
    from mlxrl.rollout.demonstrations import Rules
    from mlxrl.train.evaluate import Evaluation
    from mlxrl.train.step import Steps
    from mlxrl.train.teacher import Teacher

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run before its models are loaded.

    table: of the algorithm, resolved; held_out: the examples to evaluate on, none without data.evaluation;
    validation: those by which an adapter is chosen, none without data.validation.
    """

    config: Config
    origin: Origin
    algorithm: Algorithm
    table: Mapping[str, Any]
    rewards: Rewards
    environment: Factory | None
    tasks: tuple[Task, ...]
    held_out: tuple[Task, ...]
    validation: tuple[Task, ...]
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
                rewarded=rewarded, episodes=environment is not None, hinted=settings.teacher.hint is not None,
                sampled=rewarded and (settings.data.evaluation or settings.data.validation) is not None,
            )  # fmt: skip
            check_sources(settings, rewarded, algorithm)
            check_reference(settings.model, algorithm)
            check_validation(settings)
            check_echo(settings, algorithm)
            check_teacher(settings, algorithm)
            if settings.run.store:
                _within(("run", "store"), store.place)
        except UserError as error:
            raise origin.locate(error) from error.__cause__
        data = settings.data
        whole, most = "answers" in algorithm.needs, settings.evaluation.examples
        tasks = _tasks(settings, data.train, None, whole)
        held_out = _tasks(settings, data.evaluation, most, whole)
        validation = _tasks(settings, data.validation, most, whole)
        try:
            scored = (held_out, validation) if whole else (tasks, held_out, validation)
            check_columns_of(settings, rewards, scored, tasks)
            check_tasks(len(tasks), settings.rollout, f"examples of {data.train}")
            sinks = tuple(_sink(name) for name in settings.run.sinks)
        except UserError as error:
            raise origin.locate(error) from error.__cause__
        return cls(
            settings, origin, algorithm, _table(settings, algorithm), rewards, environment, tuple(tasks),
            tuple(held_out), tuple(validation), sinks,
        )  # fmt: skip

    @property
    def completed(self) -> tuple[Task, ...]:
        """The examples that the model completes: those of evaluations alone, where it learns from answers."""
        return self.held_out or self.validation if "answers" in self.algorithm.needs else self.tasks

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

        def fitted(some: Sequence[Task]) -> Fitting:
            if learned is not None:
                return learnable(policy, some, learned)
            return fitting_prompts(policy, some, self.config.sampling, self.environment)

        if trained:
            self.require_tasks(fitted(self.tasks))
        for some in filter(None, (self.validation if trained else (), self.held_out)):
            fitted(some)
        return policy

    def require_tasks(self, fitted: Fitting) -> Fitting:
        """What fits of the examples to train on; SettingError where a step wants more of them."""
        check_tasks(len(fitted.tasks), self.config.rollout, f"examples of {self.config.data.train} that fit")
        return fitted

    def learned(self, model: Any) -> Rules | None:
        """How examples become what an algorithm learns that learns from answers; None for one that samples."""
        from mlxrl.rollout.demonstrations import rules_for

        turns, config = turns_of(self.algorithm), self.config
        return turns and rules_for(model, turns, config.sampling.thinking, config.train.max_tokens_per_sequence)

    def teacher(self, policy: Policy) -> Teacher | None:
        """The teacher of a policy, its model loaded where it has one of its own; None for an algorithm without one.

        Raises:
            UserError: it cannot be had, has another vocabulary, or hinted prompts do not fit its context.
        """
        from mlxrl.policy.policy import load
        from mlxrl.rollout.sample import fitting_prompts
        from mlxrl.train.teacher import Teacher, fitting_teacher, teacher_of

        given = self.config.teacher
        if "teacher" not in self.algorithm.needs:
            return None
        own = given.id not in (None, "base")
        loaded = load(given.id or "", lora=None, dtype=given.dtype, adapter=given.adapter) if own else None
        teacher = Teacher(loaded, base=given.id == "base", hint=given.hint, thinking=given.thinking)
        found = teacher_of(policy, self.algorithm, teacher)
        fitted = fitting_prompts(policy, self.tasks, self.config.sampling, self.environment)
        self.require_tasks(fitting_teacher(found, fitted))
        return found

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

    def evaluation_settings(self) -> dict[str, Any]:
        """The settings that an evaluation follows from, besides its policy and its examples."""
        tables = resolved(self.config, self.table)
        names = ("seed", "evaluation", "sampling", "reward", "environment")
        turns, longest = turns_of(self.algorithm), self.config.train.max_tokens_per_sequence
        answers = {"answers": {"turns": turns, "max_tokens_per_sequence": longest}} if turns else {}
        return {**{name: tables[name] for name in names if name in tables}, **answers}

    def evaluate(self, policy: Policy, tasks: Sequence[Task], step: int, samples: int = 0) -> Evaluation:
        """Evaluate a policy on examples after so many steps; samples: of each besides."""
        from mlxrl.train.evaluate import evaluate

        given = self.config.evaluation
        sampling = replace(self.config.sampling, temperature=given.temperature, top_p=1.0, top_k=0, min_p=0.0)
        return evaluate(
            policy, tasks, self.rewards, sampling=sampling, samples=samples,
            samples_temperature=given.samples_temperature, environment=self.environment, limits=self.limits(),
            max_rows=self.config.rollout.max_rows, seed=self.config.seed, state=TrainerState(step, self.config.steps),
            turns=turns_of(self.algorithm), train=self.config.train,
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

    adapter = _within(("model", "adapter"), read, settings.model.adapter)
    return replace(settings, lora=taken_over(settings.lora, adapter))


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


def _tasks(settings: Config, source: str | None, limit: int | None, whole: bool) -> list[Task]:
    data: Any = settings.data
    columns = {**({} if data.completion is None else {"completion": data.completion}), **data.columns}
    read = partial(read_tasks, system=data.system, limit=limit, whole=whole, **columns)
    return [] if source is None else read(source, data.prompt)
