"""What several test modules play: tokenizers with templates, a policy, and an environment that answers."""

from __future__ import annotations

from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from helpers import moved
from mlxrl.policy.policy import Policy, as_policy
from mlxrl.rollout.sample import sample
from mlxrl.settings import EpisodeLimits, LoRA, Sampling
from mlxrl.types import Feedback, Group, Task, Trajectory
from models import dense, tokenizer

NEWLINE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIMMED = NEWLINE.replace("m['content']", "m['content'] | trim").replace("<end>\n", " <end>")
SHORT = Sampling(max_tokens=6)
TASKS = [Task("hello", {"turns": 3}), Task("a longer question", {"turns": 1}), Task("why", {"turns": 5})]


def words(template: str | None = NEWLINE, eos: tuple[str, ...] = ("<end>",), more: int = 0) -> TokenizerWrapper:
    """A tokenizer with a template; so many letters end a sequence too."""
    made: Any = tokenizer(eos)
    made._tokenizer.chat_template, made.has_chat_template = template, template is not None
    for letter in range(more):
        made._eos_token_ids.add(9 + 5 * letter)
    return made


def brief_policy(make: Any = dense, template: str | None = NEWLINE, more: int = 30, **changes: Any) -> Policy:
    """A policy whose replies end after a few letters."""
    p = as_policy(make(**changes), words(template, more=more), lora=LoRA())
    moved(p)
    return p


class Counting:
    """Counts its answers; an episode has as many turns as its task wants."""

    def reset(self, task: Task) -> Any:
        self.task, self.turn = task, 0
        return task.prompt

    def step(self, reply: str) -> Feedback:
        self.turn += 1
        done = self.turn == self.task.columns.get("turns")
        return Feedback("turn " + "!" * self.turn, reward=float(len(reply)), done=done, state=(self.turn, reply))


def play(p: Policy, environment: Any = Counting, tasks: Any = TASKS, **options: Any) -> tuple[Group, ...]:
    """Two short episodes of each task; fields of `EpisodeLimits` among the options are its limits."""
    given = {"group_size": 2, "sampling": SHORT, **options}
    limits = {name: given.pop(name) for name in list(given) if name in EpisodeLimits.__dataclass_fields__}
    return sample(p, tasks, environment=environment, limits=EpisodeLimits(**limits), **given)


def every(groups: tuple[Group, ...]) -> list[Trajectory]:
    """The trajectories of all groups."""
    return [one for group in groups for one in group]
