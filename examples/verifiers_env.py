"""Environments of the `verifiers` library, those with `env_response` and a rubric (pip install "verifiers<0.3").

    from examples.verifiers_env import Verifiers

    world = Verifiers(load_environment())             # of your single-file environment
    groups = rl.sample(policy, world.tasks(64), group_size=8, environment=world)

A prompt, what the environment responds and when it stops are its own; the reward is its rubric's, at the end. Turns are
bounded by `EpisodeLimits(max_turns=...)` or by the environment. Its coroutines run on one event loop, in a thread.
Environments with tools are not adapted, because they read calls that a server has parsed: see `mlxrl.tools`.
"""

import asyncio
import threading

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import AssistantMessage, ClientConfig

from mlxrl.types import Feedback, Task


class Nobody(Client):
    """The model is sampled elsewhere: nothing is ever asked."""

    def __init__(self):
        pass

    def setup_client(self, config: ClientConfig):
        raise RuntimeError("the model is sampled by mlxrl")

    async def to_native_tool(self, tool):
        raise RuntimeError("the model is sampled by mlxrl")

    async def to_native_prompt(self, messages):
        raise RuntimeError("the model is sampled by mlxrl")

    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        raise RuntimeError("the model is sampled by mlxrl")

    async def raise_from_native_response(self, response):
        raise RuntimeError("the model is sampled by mlxrl")

    async def from_native_response(self, response):
        raise RuntimeError("the model is sampled by mlxrl")

    async def close(self):
        pass


class Verifiers:
    """A factory of the episodes of one environment."""

    def __init__(self, environment):
        if not isinstance(environment, vf.MultiTurnEnv) or isinstance(environment, vf.ToolEnv):
            got = type(environment).__name__
            raise ValueError(f"verifiers: wanted a MultiTurnEnv without tools, got {got}; mlxrl.tools has tools")
        self.environment = environment
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True, name="verifiers").start()

    def tasks(self, count=-1, evaluation=False):
        """The rows of the environment's data set, as tasks."""
        made = self.environment.get_eval_dataset(count) if evaluation else self.environment.get_dataset(count)
        return [Task(_prompt(row), {"row": dict(row)}) for row in made]

    def __call__(self):
        """The environment of an episode."""
        return Episode(self)

    def run(self, coroutine):
        """The result of a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()


class Episode:
    """One rollout of the environment, driven turn by turn."""

    def __init__(self, factory):
        self.factory, self.environment = factory, factory.environment
        self.state, self.read, self.over = None, [], False

    def reset(self, task):
        """Make the state, and what is read first."""
        return self.factory.run(self._begin(task.columns["row"]))

    def step(self, reply):
        """Take the model's message; where it was the last one, the rubric scores the rollout."""
        return self.factory.run(self._step(reply))

    def close(self):
        """Clean up what an episode that did not come to its end has left."""
        if self.state is not None and not self.over:
            self.factory.run(self._end())

    async def _begin(self, row):
        self.state = await self.environment.init_state(row, Nobody(), "policy")
        made = await self.environment.setup_state(self.state)
        self.state = self.state if made is None else made
        self.read = list(await self.environment.get_prompt_messages(self.state))
        return [_plain(message) for message in self.read]

    async def _step(self, reply):
        state, environment = self.state, self.environment
        said = AssistantMessage(content=reply)
        turn = {
            "prompt": self.read, "completion": [said], "response": None, "tokens": None, "reward": None,
            "advantage": None, "is_truncated": False, "trajectory_id": state["trajectory_id"], "extras": {},
        }  # fmt: skip
        await environment.add_trajectory_step(state, turn)
        if await environment.is_completed(state):
            return await self._scored()
        known = len(self.read) + 1
        self.read = list(await environment.get_prompt_messages(state))
        if await environment.is_completed(state):
            return await self._scored()
        return Feedback(tuple(_plain(message) for message in self.read[known:]))

    async def _scored(self):
        await self._end()
        if self.state.get("error") is not None:
            raise RuntimeError(f"verifiers: {self.state['error']}")
        await self.environment.rubric.score_rollout(self.state)
        return Feedback(reward=float(self.state["reward"]), done=True)

    async def _end(self):
        self.over = True
        await self.environment.cleanup(self.state)


def _plain(message):
    """A message as the chat template takes it."""
    fields = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    return {name: fields[name] for name in ("role", "content", "name") if fields.get(name) is not None}


def _prompt(row):
    return tuple(_plain(message) for message in row["prompt"]) if isinstance(row["prompt"], list) else row["prompt"]
