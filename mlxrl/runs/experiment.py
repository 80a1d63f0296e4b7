"""What a config means: data, algorithm, rewards, environment, sinks, built once before a run; then its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mlxrl import algo, plugins, store
from mlxrl.checked import SettingError
from mlxrl.config import Origin, resolved, text
from mlxrl.data import fingerprint
from mlxrl.data import tasks as read_tasks
from mlxrl.errors import UserError, did_you_mean
from mlxrl.protocols import Algorithm
from mlxrl.rewards import TrainerState
from mlxrl.rewards.scoring import Rewards, check_columns, rewards_of, tell_missing
from mlxrl.rollout.environment import Factory, check_factory, gives_rewards
from mlxrl.runs.sinks import Sink, UserSink
from mlxrl.settings import EpisodeLimits
from mlxrl.tables import Config
from mlxrl.train.check import check_run, check_tasks
from mlxrl.types import Task

if TYPE_CHECKING:
    from mlxrl.policy.policy import Policy
    from mlxrl.rollout.chat import Fitting
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
            )  # fmt: skip
            _check_data_settings(settings, rewarded)
            _check_validation(settings)
            _check_echo(settings, algorithm)
            _check_teacher(settings, algorithm)
            if settings.run.store:
                _within(("run", "store"), store.place)
        except UserError as error:
            raise origin.locate(error) from error.__cause__
        data = settings.data
        tasks = _tasks(settings, data.train, None)
        held_out = _tasks(settings, data.evaluation, settings.evaluation.examples)
        validation = _tasks(settings, data.validation, settings.evaluation.examples)
        try:
            _check_data(settings, rewards, tasks, held_out, validation)
            check_tasks(len(tasks), settings.rollout, f"examples of {data.train}")
            sinks = tuple(_sink(name) for name in settings.run.sinks)
        except UserError as error:
            raise origin.locate(error) from error.__cause__
        return cls(
            settings, origin, algorithm, _table(settings, algorithm), rewards, environment, tuple(tasks),
            tuple(held_out), tuple(validation), sinks,
        )  # fmt: skip

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
        from mlxrl.rollout.sample import fitting_prompts
        from mlxrl.rollout.stop_rules import rules_of

        model = self.config.model
        lora, adapter = (self.config.lora, model.adapter) if trained else (None, adapter)
        policy = load(model.id, lora=lora, dtype=model.dtype, adapter=adapter, seed=self.config.seed)
        rules_of(policy.tokenizer, self.config.sampling)
        if trained:
            self.require_tasks(fitting_prompts(policy, self.tasks, self.config.sampling, self.environment))
        for some in filter(None, (self.validation if trained else (), self.held_out)):
            fitting_prompts(policy, some, self.config.sampling, self.environment)
        return policy

    def require_tasks(self, fitted: Fitting) -> Fitting:
        """What fits of the examples to train on; SettingError where a step wants more of them."""
        check_tasks(len(fitted.tasks), self.config.rollout, f"examples of {self.config.data.train} that fit")
        return fitted

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
        return run(
            policy, self.tasks, self.algorithm, reward=replace(config.reward, functions=self.rewards.functions),
            environment=self.environment, teacher=teacher, steps=config.steps, rollout=config.rollout,
            sampling=config.sampling, limits=self.limits(), train=config.train, optimizer=config.optimizer,
            seed=config.seed, resume=resume,
        )  # fmt: skip

    def evaluation_settings(self) -> dict[str, Any]:
        """The settings that an evaluation follows from, besides its policy and its examples."""
        tables = resolved(self.config, self.table)
        names = ("seed", "evaluation", "sampling", "reward", "environment")
        return {name: tables[name] for name in names if name in tables}

    def evaluate(self, policy: Policy, tasks: Sequence[Task], step: int, samples: int = 0) -> Evaluation:
        """Evaluate a policy on examples after so many steps; samples: of each besides."""
        from mlxrl.train.evaluate import evaluate

        given = self.config.evaluation
        sampling = replace(self.config.sampling, temperature=given.temperature, top_p=1.0, top_k=0, min_p=0.0)
        return evaluate(
            policy, tasks, self.rewards, sampling=sampling, samples=samples,
            samples_temperature=given.samples_temperature, environment=self.environment, limits=self.limits(),
            max_rows=self.config.rollout.max_rows, seed=self.config.seed, state=TrainerState(step, self.config.steps),
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


def _tasks(settings: Config, source: str | None, limit: int | None) -> list[Task]:
    data = settings.data
    return [] if source is None else read_tasks(source, data.prompt, system=data.system, limit=limit, **data.columns)


def _check_data_settings(settings: Config, rewarded: bool) -> None:
    """SettingError for settings of data and evaluation that do not go together."""
    data = settings.data
    if taken := [name for name in data.columns if name in ("source", "prompt", "system", "limit")]:
        raise SettingError("data", "columns", f"{taken[0]!r} is a name that is taken; rename the column to another")
    for name in ("evaluation", "validation"):
        source = getattr(data, name)
        if source is not None and source == data.train:
            raise SettingError("data", name, "wanted examples that are not trained on, got the training data")
        if source is not None and not rewarded:
            raise SettingError("reward", f"wanted at least one function, got none; data.{name} is scored by them")
    if data.evaluation is None and data.validation is None:
        given = [("evaluation", one.name) for one in fields(settings.evaluation)
                 if getattr(settings.evaluation, one.name) != one.default]  # fmt: skip
        for where in given + [("run", "evaluate_every")] * (settings.run.evaluate_every > 0):
            raise SettingError(*where, "has no effect without data.evaluation or data.validation")
    if data.evaluation is None and settings.evaluation.samples:
        raise SettingError("evaluation", "samples", "has no effect without data.evaluation")


def _check_validation(settings: Config) -> None:
    """SettingError for a choice of adapters without the examples or the evaluations that it is made by."""
    given, run = settings.data.validation, settings.run
    choices = {"keep": run.keep == "best", "patience": run.patience, "accept_margin": run.accept_margin is not None}
    chosen = next((name for name, value in choices.items() if value), None)
    if chosen and given is None:
        why = "wanted data.validation, by which an adapter is chosen: what is reported on data.evaluation is not"
        raise SettingError("run", chosen, why)
    if given is not None and given == settings.data.evaluation:
        why = "wanted other examples than those of data.evaluation, because what is reported is not what is chosen by"
        raise SettingError("data", "validation", why)
    if given is not None and not run.evaluate_every:
        raise SettingError("data", "validation", "has no effect without run.evaluate_every")


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


def _check_data(
    settings: Config, rewards: Rewards, tasks: Sequence[Task], held_out: Sequence[Task], validation: Sequence[Task]
) -> None:
    """SettingError for columns that rewards or the teacher want and the data lack, and for examples that chose."""
    if validation and fingerprint(validation) == fingerprint(held_out):
        raise SettingError("data", "validation", "wanted other examples than those of data.evaluation, got the same")
    for some in (tasks, held_out, validation):
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
