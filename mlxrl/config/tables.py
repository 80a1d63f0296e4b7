"""The tables of a config file, their keys, defaults and bounds.

A key's default is what a run does without it; None stands for a key that is left out. Relative paths are looked for
beside the config file first, then in the current directory; `run.folder` is relative to the current directory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from mlxrl.config.strict import Within
from mlxrl.settings import LARGEST_REWARD, LONGEST, Sampling

Count: TypeAlias = Annotated[int, Within(1)]
Natural: TypeAlias = Annotated[int, Within(0)]
Positive: TypeAlias = Annotated[float, Within(0, above=True)]
Text: TypeAlias = Annotated[str, Within(1)]


@dataclass(frozen=True, slots=True)
class Model:
    """id: Hugging Face id, mlx-lm folder or .gguf file. dtype: None keeps that of the files."""

    id: Text
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters y = W x + scale * B A x. keys: layers by name; None for every linear layer of the blocks."""

    rank: Count = 8
    scale: Annotated[float, Within(0, above=True, why="at 0 the adapter has no effect")] = 2.0
    dropout: Annotated[float, Within(0, math.nextafter(1, 0))] = 0.0
    keys: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Data:
    """train, evaluation: sources of `mlxrl.tasks`. columns: renames, `answer = "solution"`. The rest: see `tasks`."""

    train: Text
    evaluation: Text | None = None
    prompt: Text = "prompt"
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    system: Text | None = None


@dataclass(frozen=True, slots=True)
class Reward:
    """functions: `module:function` or `file.py:function`; none where a teacher alone teaches and nothing is evaluated.
    weights: one each; None for 1 each.

    overlong_buffer: tokens before the limit from which on a completion loses reward, evenly up to overlong_factor at
    the limit, but no more than overlong_cap; 0 is off. length_penalty: what the longest of a group loses, in parts of
    the group's mean reward, and the others in proportion to their length.
    """

    functions: tuple[str, ...] = ()
    weights: tuple[float, ...] | None = None
    overlong_buffer: Natural = 0
    overlong_factor: Positive = 1.0
    overlong_cap: Positive | None = None
    length_penalty: Annotated[float, Within(0)] = 0.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """A step samples group_size completions of tasks_per_step prompts each. max_rows: sequences that decode together.

    max_draws: with more than 1, prompts whose attempts are all rewarded alike are left out of the step, and others are
    asked in their place until it has its tasks_per_step or that many draws are made; what has been found then counts.
    """

    tasks_per_step: Count = 4
    group_size: Count = 8
    max_rows: Count = 32
    max_draws: Count = 1


@dataclass(frozen=True, slots=True)
class Environment:
    """What answers the model, where a task takes several turns; see `types.Environment`.

    factory: `module:Class` or `file.py:Class`, or a function that makes an environment; arguments: its keywords.
    max_turns: actions of an episode. max_episode_tokens: what they may have together, besides sampling.max_tokens each.
    timeout: seconds that a call may take. invalid_penalty: what a turn loses whose action was invalid.
    """

    factory: Text | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_turns: Count = 8
    max_episode_tokens: Count | None = None
    timeout: Annotated[float, Within(0, LONGEST, above=True)] = 60.0
    invalid_penalty: Annotated[float, Within(0, LARGEST_REWARD)] = 0.0


@dataclass(frozen=True, slots=True)
class Teacher:
    """Who judges the samples, for an algorithm that learns from one.

    id: a model with the same vocabulary, as in [model], or "base" for the model without its adapters; left out, the
    model itself under a hint. dtype, adapter: of that model; adapter: a folder saved before.
    hint: the column whose text stands behind the prompt for the teacher alone.
    """

    id: Text | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    adapter: Text | None = None
    hint: Text | None = None


@dataclass(frozen=True, slots=True)
class Algorithm:
    """name: a recipe of `mlxrl.algo.recipes`. arguments: the table's other keys, which are the recipe's arguments."""

    name: str = "grpo"
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Echo:
    """Predicting what an environment answers, beside the algorithm, as in `algo.with_echo`.

    weight: of the loss; 0 is off. taper: the weight falls linearly to 0 over the run's steps.
    """

    weight: Annotated[float, Within(0)] = 0.0
    taper: bool = False


@dataclass(frozen=True, slots=True)
class Train:
    """tokens_per_pass: tokens of one forward and backward pass, which bounds memory and changes nothing else; left out,
    the largest that fits, see `mlxrl plan`. max_tokens_per_row: where a row is cut for training, its prompt included.
    recompute: keep only the inputs of layers in a pass, which takes a third more time and far less memory.
    updates_per_rollout: times that a step goes through its groups. minibatches: optimizer steps each time, for which
    the groups are dealt into so many parts, anew every time."""

    tokens_per_pass: Count | None = None
    max_tokens_per_row: Count | None = None
    recompute: bool = False
    updates_per_rollout: Count = 1
    minibatches: Count = 1


@dataclass(frozen=True, slots=True)
class Memory:
    """In GB, 1e9 bytes. cache_limit: of the buffers that MLX keeps for reuse; None for a quarter of the memory.
    wired_limit: of what MLX may wire on Metal, where raising it has been seen to bring machines down; None is off."""

    cache_limit: Annotated[float, Within(0, 1e6)] | None = None
    wired_limit: Annotated[float, Within(0, 1e6, above=True)] | None = None


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The learning rate rises over warmup_steps and then follows the schedule to the last step.

    Both count the steps of the run; a step of several optimizer steps moves along the schedule with each.
    betas: None for the optimizer's own. max_grad_norm: the gradient's norm is clipped to it; inf switches that off.
    """

    name: Literal["adamw", "adam", "sgd", "lion"] = "adamw"
    learning_rate: Annotated[float, Within(0, above=True, why="at 0 nothing is learned")] = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Natural = 0
    weight_decay: Annotated[float, Within(0)] = 0.0
    betas: tuple[float, float] | None = None
    max_grad_norm: Annotated[
        float, Within(0, math.inf, above=True, why="at 0 nothing is learned; inf switches clipping off")
    ] = 1.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """rows: the first so many; None for all. success: the reward from which on a row counts as right."""

    rows: Count | None = None
    temperature: Annotated[float, Within(0)] = 0.0
    success: Annotated[float, Within()] = 1.0


@dataclass(frozen=True, slots=True)
class Run:
    """folder: None for the first free one of runs/NAME, runs/NAME-2, ... with the config file's name.

    checkpoint_every, evaluate_every, samples_every: steps between two of them, 0 for never. Evaluations before the
    first and after the last step are made whenever there are data for them.
    """

    folder: Text | None = None
    checkpoint_every: Natural = 50
    evaluate_every: Natural = 0
    samples_every: Natural = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A run. Together with `seed` it decides everything that is drawn."""

    seed: Annotated[int, Within(0, 2**32 - 1)] = 0
    steps: Count = 100
    model: Model
    lora: Lora = field(default_factory=Lora)
    data: Data
    reward: Reward = field(default_factory=Reward)
    sampling: Sampling = field(default_factory=Sampling)
    rollout: Rollout = field(default_factory=Rollout)
    environment: Environment = field(default_factory=Environment)
    algorithm: Algorithm = field(default_factory=Algorithm)
    teacher: Teacher = field(default_factory=Teacher)
    echo: Echo = field(default_factory=Echo)
    train: Train = field(default_factory=Train)
    memory: Memory = field(default_factory=Memory)
    optimizer: Optimizer = field(default_factory=Optimizer)
    evaluation: Evaluation = field(default_factory=Evaluation)
    run: Run = field(default_factory=Run)
