"""The settings that TOML and Python share, declared once: type, bounds, default and meaning, by the same names.

In TOML a class is the table of its name, `[rollout] group_size = 8`; in Python it is a value, `Rollout(group_size=8)`.
A default is what a run does without the key; None stands for a key that is left out. The tables that only a config has,
where Python takes objects, are in `tables`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from mlxrl.checked import (
    Characters,
    Count,
    Natural,
    NotNegative,
    Positive,
    SettingError,
    Share,
    Text,
    Unbounded,
    at_most,
    because,
    checked,
    says,
)
from mlxrl.errors import brief

MOST_COMPLETIONS = 1_000_000
"""Completions of a step at most: all of them are kept."""
LONGEST = 1e6
"""Seconds that a call of user code may be given at most."""
LARGEST_REWARD = 1e30
"""The size of a reward at most: the square of a larger one is no float32."""

COLDEST = 1e-6
"""The lowest temperature that logits are divided by."""
Some = Annotated[Count, at_most(65_536)]
"""A count of what stands in memory, or is done anew, for each."""

Dtype = Literal["float32", "bfloat16", "float16"]
Reference = Literal["start", "base"]


@checked("model")
class Model:
    """The model that is trained."""

    id: Annotated[Text, says("Hugging Face id, mlx-lm folder, or llama .gguf file")]
    dtype: Annotated[Dtype | None, says("type of the weights; left out, that of the files")] = None
    adapter: Annotated[
        Text | None,
        says("adapter to go on from in place of [lora]: a folder of a run, mlx-lm or PEFT, or sha256:DIGEST"),
    ] = None
    reference: Annotated[
        Reference | None,
        says("what a KL compares with: the model as training finds it, or without adapter; left out, 'start'"),
    ] = None


@checked("lora")
class LoRA:
    """Low-rank adapters y = W x + scale B A x (arXiv 2106.09685), the only weights that are trained."""

    rank: Annotated[int, Meta(ge=1, le=65536), says("LoRA rank: the rank of B A")] = 8
    scale: Annotated[float, Meta(gt=0, le=1e6), because("at 0 the adapter has no effect"), says("multiplies B A")] = 2.0
    dropout: Annotated[float, Meta(ge=0, lt=1), says("share of the adapter's inputs dropped in training")] = 0.0
    keys: Annotated[tuple[Text, ...] | None, says("layers by name; left out, every linear layer of the blocks")] = None
    layers: Annotated[Count | None, says("so many of the last blocks; left out, all")] = None
    dora: Annotated[bool, says("DoRA (arXiv 2402.09353): a trained norm for each output of W + scale B A")] = False

    def check(self) -> None:
        if self.keys is not None and not self.keys:
            raise SettingError("keys", "wanted at least one name, got none; leave it out for every linear layer")


def refuse_cold(temperature: float) -> None:
    """SettingError for a temperature at which logits are not finite."""
    if 0 < temperature < COLDEST:
        why = f"wanted at least {COLDEST:g}, or 0 for greedy decoding, got {temperature:g}"
        raise SettingError("temperature", why)


Warm = Annotated[float, Meta(ge=COLDEST)]
"""A temperature of random draws."""


@checked("sampling")
class Sampling:
    """How tokens are drawn. Temperature comes first; the filters act on the tempered distribution.

    A temperature of 0 is greedy decoding, whose log-probs are those of temperature 1. The penalties are mlx-lm's, on
    the logits before the temperature. Evaluations take these settings with a temperature of their own and no filters.
    """

    max_tokens: Annotated[Count, says("tokens of a completion at most; with an environment, of each turn")] = 256
    temperature: Annotated[NotNegative, says("divides the logits; 0 is greedy decoding")] = 1.0
    top_p: Annotated[
        float, Meta(gt=0, le=1), says("draw from the smallest set of tokens with this probability; 1 is off")
    ] = 1.0
    top_k: Annotated[Natural, says("draw from the k most likely tokens; 0 is off")] = 0
    min_p: Annotated[Share, says("draw from tokens with at least this share of the highest probability; 0 is off")] = (
        0.0
    )
    stop_strings: Annotated[
        tuple[Characters, ...], says("texts that end a completion, special tokens written out")
    ] = ()
    min_tokens: Annotated[Natural, says("tokens before which nothing ends a completion")] = 0
    thinking: Annotated[bool | None, says("the chat template's thinking switch; left out, its default")] = None
    thinking_budget: Annotated[Natural | None, says("tokens of thinking, after which its end is forced")] = None
    repetition_penalty: Annotated[Positive, says("divides logits of recent tokens; 1 is off")] = 1.0
    presence_penalty: Annotated[float, says("subtracted once from logits of recent tokens; 0 is off")] = 0.0
    frequency_penalty: Annotated[float, says("subtracted for every time a token is among the recent; 0 is off")] = 0.0
    penalty_context: Annotated[Some, says("recent tokens that the penalties look at, the prompt's included")] = 20
    num_top: Annotated[Natural, says("most likely tokens whose ids and log-probs are kept at each position")] = 0

    @property
    def filters(self) -> bool:
        """Whether unlikely tokens are left out."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def softmax_temperature(self) -> float:
        """The temperature that log-probs are taken at: 1 for greedy decoding."""
        return self.temperature or 1.0

    def check(self) -> None:
        refuse_cold(self.temperature)
        if self.min_tokens > self.max_tokens:
            raise SettingError("min_tokens", f"wanted at most max_tokens, {self.max_tokens}, got {self.min_tokens}")
        if self.penalty_context != 20 and not self.penalized:
            raise SettingError("penalty_context", "has no effect without a penalty")


@checked("rollout")
class Rollout:
    """What a step samples: `group_size` completions of each of `tasks_per_step` prompts."""

    tasks_per_step: Annotated[Some, says("prompts of a step")] = 4
    group_size: Annotated[Some, says("completions of each prompt, which are compared with one another")] = 8
    max_rows: Annotated[Count, says("sequences that decode together at most")] = 32
    resampling_rounds: Annotated[
        Natural,
        at_most(1000),
        says("DAPO's dynamic sampling: rounds in which zero-variance groups are replaced; 0 is off"),
    ] = 0

    def check(self) -> None:
        if (most := MOST_COMPLETIONS // self.tasks_per_step) < self.group_size:
            why = f"wanted at most {most}, which make {MOST_COMPLETIONS:,} completions of a step, got {self.group_size}"
            raise SettingError("group_size", why)
        if self.resampling_rounds and self.group_size == 1:
            raise SettingError(
                "resampling_rounds", "wanted 0, because a group of 1 completion has no two different rewards"
            )


@checked("reward")
class Reward:
    """The functions that score completions, and how their values become one reward."""

    functions: Annotated[
        tuple[Any, ...], says("`module:function` or `file.py:function`, of TRL's signature; in Python the functions")
    ] = ()
    weights: Annotated[tuple[float, ...] | None, says("factor of each function; left out, 1")] = None
    timeout: Annotated[
        Annotated[float, Meta(gt=0, le=LONGEST)] | None,
        says("seconds of a call of a function, which then runs in a thread of its own; left out, no limit"),
    ] = None
    retry_each: Annotated[
        bool, says("a function that raises for a step's completions is called again for each of them by itself")
    ] = False
    special_tokens: Annotated[bool, says("functions get completions with their special tokens written out")] = False
    overlong_buffer: Annotated[Natural, says("tokens before the limit in which reward is taken off; 0 is off")] = 0
    overlong_factor: Annotated[float, Meta(gt=0, le=LARGEST_REWARD), says("what a completion at the limit loses")] = 1.0
    overlong_cap: Annotated[Positive | None, says("the most that is taken off")] = None
    length_penalty: Annotated[
        NotNegative, says("what the longest of a group loses, in parts of its mean reward where that is above 0")
    ] = 0.0

    def check(self) -> None:
        for name, default in (("overlong_factor", 1.0), ("overlong_cap", None)):
            if not self.overlong_buffer and getattr(self, name) != default:
                raise SettingError(name, "has no effect without overlong_buffer")
        for name, default in (("timeout", None), ("retry_each", False), ("special_tokens", False)):
            if not self.functions and getattr(self, name) != default:
                raise SettingError(name, "has no effect without functions")
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise SettingError("weights", f"wanted {len(self.functions)}, one per function, got {len(self.weights)}")
        if self.functions and self.weights is not None and not any(self.weights):
            raise SettingError("weights", f"wanted numbers that are not all 0, got {list(self.weights)}")
        if twice := next((one for one in self.functions if self.functions.count(one) > 1), None):
            raise SettingError("functions", f"{twice!r} stands there twice; use weights")
        for one in self.functions:
            if not callable(one) and not (isinstance(one, str) and one.strip()):
                raise SettingError("functions", f"wanted functions, or their names, got {brief(one)}")


@checked("environment")
class EpisodeLimits:
    """What an episode may take."""

    max_turns: Annotated[Count, says("completions of an episode at most")] = 8
    max_episode_tokens: Annotated[Count | None, says("tokens sampled in an episode at most, over all turns")] = None
    timeout: Annotated[float, Meta(gt=0, le=LONGEST), says("seconds of a call of the environment")] = 60.0
    invalid_penalty: Annotated[
        float, Meta(ge=0, le=LARGEST_REWARD), says("what a turn loses whose action was invalid")
    ] = 0.0


@checked("train")
class Train:
    """How a step's completions become updates."""

    tokens_per_pass: Annotated[
        Count | None,
        says("tokens of a forward and backward pass at most, which bounds memory; left out, chosen"),
    ] = None
    max_tokens_per_sequence: Annotated[
        Count | None, says("tokens of a sequence, its prompt included, after which it is not trained on")
    ] = None
    recompute: Annotated[bool, says("gradient checkpointing: a third more time, far less memory")] = False
    updates_per_rollout: Annotated[Some, says("PPO epochs over the completions of a step")] = 1
    max_steps_without_signal: Annotated[
        Natural, says("steps in a row without a learning signal after which the run ends; 0 is off")
    ] = 0
    minibatches: Annotated[Count, says("PPO minibatches of an epoch; the groups are split anew in each epoch")] = 1


@checked("optimizer")
class Optimizer:
    """The optimizer and its learning rate, which rises over the warm-up and then follows the schedule."""

    name: Annotated[Literal["adamw", "adam", "sgd", "lion"], says("MLX's optimizer; Adam's with bias correction")] = (
        "adamw"
    )
    learning_rate: Annotated[
        Positive, because("at 0 nothing is learned"), says("the highest learning rate of the run")
    ] = 1e-5
    schedule: Annotated[
        Literal["constant", "linear", "cosine"], says("how the learning rate falls to the last step")
    ] = "constant"
    warmup_steps: Annotated[Natural, says("steps over which the learning rate rises")] = 0
    weight_decay: Annotated[NotNegative, says("weight decay, of adamw, sgd and lion")] = 0.0
    betas: Annotated[
        tuple[Annotated[float, Meta(ge=0, lt=1)], Annotated[float, Meta(ge=0, lt=1)]] | None,
        says("decay of the moments; left out, (0.9, 0.999), and (0.9, 0.99) for lion"),
    ] = None
    max_grad_norm: Annotated[
        Positive, Unbounded, because("at 0 nothing is learned; inf switches clipping off"),
        says("the gradient's norm is clipped to this"),
    ] = 1.0  # fmt: skip

    def check(self) -> None:
        if self.weight_decay and self.name == "adam":
            raise SettingError("weight_decay", "adam has none; wanted name = 'adamw', or weight_decay left out")
        if self.betas is not None and self.name == "sgd":
            raise SettingError("betas", "sgd has none; leave it out")
