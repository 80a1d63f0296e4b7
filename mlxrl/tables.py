"""The further tables of a config: where data, models and user code come from, how a run is evaluated and kept.

Each key is declared once, as in `settings`. Paths are looked for beside the config file first, then in the current
directory; `run.folder` is relative to the current directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from msgspec import Meta

from mlxrl.checked import Count, Natural, NotNegative, Seed, SettingError, Text, at_most, checked, says
from mlxrl.settings import (
    Dtype,
    EpisodeLimits,
    LoRA,
    Model,
    Optimizer,
    Reward,
    Rollout,
    Sampling,
    Train,
    Warm,
    refuse_cold,
)


@checked("data")
class Data:
    """Where examples come from, and which column is the prompt. See `mlxrl.tasks` for what a source may be."""

    train: Annotated[Text, says("source of the examples that are trained on")]
    evaluation: Annotated[Text | None, says("source of the held-out examples")] = None
    validation: Annotated[Text | None, says("source of held-out examples by which an adapter is chosen")] = None
    prompt: Annotated[Text, says("column with the prompt: a text, or a list of messages")] = "prompt"
    completion: Annotated[Text | None, says("column with the answer that sft learns; left out, `completion`")] = None
    columns: Annotated[Mapping[str, Text], says("renames: answer = 'solution'")] = field(default_factory=dict[str, str])
    system: Annotated[Text | None, says("system message put before every prompt")] = None


@checked("environment")
class Environment(EpisodeLimits):
    """What answers the model where a task takes several turns; see `protocols.Environment`."""

    factory: Annotated[Text | None, says("`module:Class` or `file.py:Class` that makes an episode's environment")] = (
        None
    )
    arguments: Annotated[Mapping[str, Any], says("keywords of the factory")] = field(default_factory=dict[str, Any])

    def check(self) -> None:
        if self.factory is None:
            for name, default in (("arguments", {}), ("max_turns", 8), ("max_episode_tokens", None),
                                  ("timeout", 60.0), ("invalid_penalty", 0.0)):  # fmt: skip
                if getattr(self, name) != default:
                    raise SettingError(name, "has no effect without environment.factory")


@checked("teacher")
class Teacher:
    """Who scores the samples, for an algorithm that learns from a teacher."""

    id: Annotated[Text | None, says("model of the same vocabulary, or 'base': the model without adapters")] = None
    dtype: Annotated[Dtype | None, says("type of the teacher's weights")] = None
    adapter: Annotated[Text | None, says("the teacher's adapter: a folder, or sha256:DIGEST")] = None
    hint: Annotated[Text | None, says("column put after the prompt for the teacher alone")] = None
    thinking: Annotated[bool | None, says("the thinking switch of the hinted prompt")] = None

    def check(self) -> None:
        for name in ("dtype", "adapter"):
            if self.id in (None, "base") and getattr(self, name) is not None:
                raise SettingError(name, "has no effect, because teacher.id names no model to be loaded")
        if self.thinking is not None and self.hint is None:
            raise SettingError("thinking", "has no effect without a hint")


@checked("memory")
class Memory:
    """Limits of MLX's allocator, in GB, 1e9 bytes."""

    limit: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        says("GB that a run is planned for, and MLX may use; left out, the machine's"),
    ] = None

    cache_limit: Annotated[
        Annotated[float, Meta(ge=0, le=1e6)] | None,
        says("GB of buffers kept for reuse; left out, a quarter of the memory"),
    ] = None
    wired_limit: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None, says("GB that MLX may wire on Metal; left out, MLX's own limit")
    ] = None


@checked("evaluation")
class Evaluation:
    """How held-out examples are evaluated."""

    examples: Annotated[Count | None, says("number of held-out examples, the first ones; left out, all")] = None
    temperature: Annotated[NotNegative, says("sampling temperature of evaluations; 0 is greedy decoding")] = 0.0
    success: Annotated[float, says("reward from which on an example counts as right")] = 1.0
    samples: Annotated[
        Natural, at_most(1000), says("samples of each example besides, from which pass@k is estimated; 0 is off")
    ] = 0
    samples_temperature: Annotated[Warm, says("sampling temperature of these samples")] = 1.0

    def check(self) -> None:
        refuse_cold(self.temperature)
        if not self.samples and self.samples_temperature != 1:
            raise SettingError("samples_temperature", "has no effect without samples")


@checked("run")
class Run:
    """The run's folder, and how often what is written there."""

    folder: Annotated[
        Text | None, says("folder of the run; left out, the first free one of runs/NAME, runs/NAME-2, ...")
    ] = None
    checkpoint_every: Annotated[Natural, says("steps between two checkpoints; 0 for none besides the last")] = 50
    checkpoint_minutes: Annotated[
        NotNegative, says("minutes after which a step is followed by a checkpoint; 0 for none besides the others")
    ] = 5.0
    checkpoints: Annotated[Count, says("newest checkpoints that are kept")] = 2
    evaluate_every: Annotated[Natural, says("steps between two evaluations, besides first and last; 0 for none")] = 0
    keep: Annotated[
        Literal["last", "best"], says("which adapter is the result: the last, or the best on data.validation")
    ] = "last"
    patience: Annotated[
        Natural, says("evaluations on data.validation without improvement after which the run ends; 0 is off")
    ] = 0
    accept_margin: Annotated[
        NotNegative | None,
        says("mean reward on data.validation that an adapter may lose, or it is taken back; left out, off"),
    ] = None
    samples_every: Annotated[Natural, says("steps between two samples on the console; 0 for none")] = 10
    store: Annotated[
        bool, says("the adapter is put into the store of adapters too, $MLXRL_STORE or ~/.mlxrl/adapters")
    ] = False
    sinks: Annotated[
        tuple[Text, ...], says("`module:name` or `file.py:name`: further sinks, which receive every step")
    ] = ()


@checked("")
class Config:
    """A run. Together with the seed it decides everything that is drawn."""

    seed: Annotated[Seed, says("from which everything random follows")] = 0
    steps: Annotated[Count, says("steps of the run, each a rollout and its updates")] = 100
    model: Model
    lora: LoRA = field(default_factory=LoRA)
    data: Data
    reward: Reward = field(default_factory=Reward)
    sampling: Sampling = field(default_factory=Sampling)
    rollout: Rollout = field(default_factory=Rollout)
    environment: Environment = field(default_factory=Environment)
    algorithm: Annotated[
        Mapping[str, Any], says("name of a recipe or `file.py:function`, its arguments, and a table for each term")
    ] = field(default_factory=lambda: {"name": "grpo"})
    teacher: Teacher = field(default_factory=Teacher)
    train: Train = field(default_factory=Train)
    memory: Memory = field(default_factory=Memory)
    optimizer: Optimizer = field(default_factory=Optimizer)
    evaluation: Evaluation = field(default_factory=Evaluation)
    run: Run = field(default_factory=Run)
