"""Episodes: several turns with an environment, through the batched loop, the packer and the trainer."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from helpers import moved
from mlxrl import algo
from mlxrl.cli import main
from mlxrl.files import read_lines
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.policy import as_policy
from mlxrl.rewards import score
from mlxrl.rollout import play
from mlxrl.rollout.engine import Subject
from mlxrl.rollout.episodes import Interrupted, rollout
from mlxrl.rollout.pool import Pool
from mlxrl.rollout.render import PromptError, render
from mlxrl.rollout.turns import Chat, go_on, open_chat
from mlxrl.rollout.worlds import Copying, EpisodeError, fault_of
from mlxrl.settings import LoRA, Reward, Sampling
from mlxrl.show.row import row as shown
from mlxrl.train.evaluate import evaluate
from mlxrl.train.loop import Step, train
from mlxrl.train.pack import micro_batch, pack, rows_of, with_prompt
from mlxrl.train.step import gradient
from mlxrl.types import Feedback, Task
from models import TEMPLATE, dense, hybrid, moe, tokenizer

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic"
MODELS = [dense, hybrid, moe]
NEWLINE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIMMED = NEWLINE.replace("m['content']", "m['content'] | trim").replace("<end>\n", " <end>")
SHORT = Sampling(max_tokens=6)
TASKS = [Task("hello", {"turns": 3}), Task("a longer question", {"turns": 1}), Task("why", {"turns": 5})]


def words(template=NEWLINE, eos=("<end>",), more=0):
    """A tokenizer with a template; so many letters end a row too."""
    made = tokenizer(eos)
    made._tokenizer.chat_template, made.has_chat_template = template, template is not None
    for letter in range(more):
        made._eos_token_ids.add(9 + 5 * letter)
    return made


def a_policy(make=dense, template=NEWLINE, more=30, **changes):
    p = as_policy(make(**changes), words(template, more=more), lora=LoRA())
    moved(p)
    return p


class Counting:
    """Says how often it was answered, as many times as its task says."""

    def reset(self, task):
        self.task, self.turn = task, 0
        return task.prompt

    def step(self, reply):
        self.turn += 1
        done = self.turn == self.task.columns.get("turns")
        return Feedback("turn " + "!" * self.turn, reward=float(len(reply)), done=done, state=(self.turn, reply))


def play_all(p, environment=Counting, tasks=TASKS, group_size=2, sampling=SHORT, **options):
    return rollout(p, tasks, group_size=group_size, sampling=sampling, environment=environment, **options)


def ids_of(groups):
    return [[[(turn.observation, turn.tokens) for turn in one.turns] for one in group] for group in groups]


def flat(groups):
    return [one for group in groups for one in group]


# What a turn adds to a row


def said(tok, text, *end):
    return (*tok.encode(text, add_special_tokens=False), *(tok.convert_tokens_to_ids(token) for token in end))


def added(tok, reply, *, observation="more", stops=None, thinking=None):
    start = open_chat(tok, "hi", thinking)
    stops = sorted(tok.eos_token_ids) if stops is None else stops
    return start.ids, go_on(tok, start.chat, reply, stops, observation, thinking)


def test_a_sampled_stop_token_of_the_template_is_not_written_twice():
    """And what a template writes behind it is: then the row is the rendering of the whole conversation."""
    tok = words()
    prompt, turn = added(tok, said(tok, "yes", "<end>"))
    assert tok.decode(turn.ids) == "\n<user>more<end>\n<assistant>"
    chat = [{"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "yes"), ("user", "more"))]
    assert (*prompt, *said(tok, "yes", "<end>"), *turn.ids) == render(tok, Task(tuple(chat)))
    assert not turn.fresh
    again = go_on(tok, turn.chat, said(tok, "no", "<end>"), sorted(tok.eos_token_ids), "last")
    assert tok.decode(again.ids) == "\n<user>last<end>\n<assistant>"
    assert again.chat.messages[3]["content"] == "no"


@pytest.mark.parametrize(
    ("template", "reply", "end", "wanted"),
    [
        (NEWLINE, "yes", (), "<end>\n<user>more<end>\n<assistant>"),  # cut, or ended by a stop string
        (NEWLINE, "yes", ("<eos>",), "<end>\n<user>more<end>\n<assistant>"),  # a stop that the template does not write
        (NEWLINE, "", ("<end>",), "\n<user>more<end>\n<assistant>"),
        (NEWLINE, " yes \n", ("<end>",), "\n<user>more<end>\n<assistant>"),
        (NEWLINE, " yes \n", (), "<end>\n<user>more<end>\n<assistant>"),
        (TRIMMED, " yes \n", ("<end>",), "<user>more <end><assistant>"),
        (TRIMMED, "yes", (), " <end><user>more <end><assistant>"),
        (NEWLINE, "a<think>b", ("<end>",), "\n<user>more<end>\n<assistant>"),
    ],
)
def test_what_stands_behind_a_reply_is_appended(template, reply, end, wanted):
    tok = words(template, ("<end>", "<eos>"))
    _, turn = added(tok, said(tok, reply, *end))
    assert (tok.decode(turn.ids), turn.fresh) == (wanted, False)


@pytest.mark.parametrize("thinking", [None, True, False])
def test_a_rewritten_history_is_a_whole_new_prompt(thinking):
    """The prompt opens a block of thinking, or closes it, which is dropped once there is a further message."""
    tok = words(TEMPLATE)
    _, turn = added(tok, said(tok, "hm</think>yes", "<end>"), thinking=thinking)
    chat = [{"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "hm</think>yes"), ("user", "more"))]
    assert turn.fresh
    assert turn.ids == render(tok, Task(tuple(chat)), thinking=thinking)


def test_observations_may_be_messages():
    tok = words()
    messages = [{"role": "system", "content": "result"}, {"role": "user", "content": "go on"}]
    _, turn = added(tok, said(tok, "yes", "<end>"), observation=messages)
    assert tok.decode(turn.ids) == "\n<system>result<end>\n<user>go on<end>\n<assistant>"


def test_without_a_template_the_text_is_appended():
    tok = words(None)
    turn = go_on(tok, Chat(), said(tok, "yes", "<eos>"), [2], "more")
    assert (tok.decode(turn.ids), turn.fresh) == ("more", False)
    with pytest.raises(PromptError, match="no chat template; wanted a string, got messages"):
        go_on(tok, Chat(), said(tok, "yes"), [2], [{"role": "user", "content": "more"}])


# Tokens


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("template", [NEWLINE, TEMPLATE])
def test_tokens_and_log_probs_are_those_of_a_fresh_forward(make, template):
    """Over kept caches, and where every turn is a row of its own."""
    p = a_policy(make, template, more=60)
    groups = play_all(p, sampling=Sampling(max_tokens=6, temperature=0.0), max_turns=4, thinking=False)
    for one in flat(groups):
        rows = rows_of(0, one, 0.0)
        assert len(rows) == (len(one.turns) if template is TEMPLATE else 1)
        for row in map(with_prompt, rows):
            own = mx.argmax(p.model(mx.array(row.tokens[None]))[0], axis=-1)
            places = np.flatnonzero(row.mask)
            assert np.array(own)[places - 1].tolist() == row.tokens[places].tolist()
            found = np.array(logprobs(p, micro_batch([row])).token_logprobs)[0]
            assert np.allclose(found[places], row.rollout[places], atol=1e-4)
    assert {len(one.turns) for one in flat(groups)} == {1, 3, 4}
    lasts = {turn.tokens[-1] in p.tokenizer.eos_token_ids for one in flat(groups) for turn in one.turns}
    assert lasts == {True, False}


@pytest.mark.parametrize("make", MODELS)
def test_an_episode_of_one_turn_is_a_rollout_bit_for_bit(make):
    """Tokens, log-probs, minibatches, loss and gradient, whether it may go on or not."""
    p, recipe = a_policy(make), algo.grpo()
    tasks = [replace(task, columns={"turns": 1}) for task in TASKS]
    plain = rollout(p, tasks, group_size=3, sampling=SHORT, key=3)
    plain = score(plain, lambda completions, **_: [float(len(text)) for text in completions])
    for turns in (1, 4):
        played = play_all(p, tasks=tasks, group_size=3, key=3, max_turns=turns)
        assert [one.stop for one in flat(played)] == ["done"] * 9
        for one, other in zip(flat(plain), flat(played), strict=True):
            assert (one.turns[0].observation, one.turns[0].tokens) == (other.prompt, other.turns[0].tokens)
            assert one.turns[0].logprobs == other.turns[0].logprobs
            assert one.reward == other.reward
        batches = [pack(groups, recipe) for groups in (plain, played)]
        for mine, own in zip(*batches, strict=True):
            assert all(mx.array_equal(getattr(mine, n), getattr(own, n)) for n in ("tokens", "mask", "advantages"))
        (metrics, grads), (others, more) = (gradient(p, batch, recipe) for batch in batches)
        assert metrics["policy/loss"] == others["policy/loss"]
        leaves = [tree_flatten(tree) for tree in (grads, more)]
        assert all(mx.array_equal(a, b) for (_, a), (_, b) in zip(*leaves, strict=True))


@pytest.mark.parametrize("make", MODELS)
def test_nobodys_tokens_depend_on_the_others(make, monkeypatch):
    """Places, refills, slow environments, and when answers are gone on with."""
    p = a_policy(make)
    wanted = ids_of(play_all(p, group_size=3, max_turns=4))
    assert len({action for group in wanted for one in group for _, action in one}) == 3 * (3 + 1 + 4)

    class Slow(Counting):
        def step(self, reply):
            time.sleep(0.15 if len(reply) % 3 == 0 else 0.0)
            return super().step(reply)

    for rows, lump in ((1, 0.1), (2, 2.0), (5, 0.1), (32, 0.1), (32, 2.0)):
        assert ids_of(play_all(p, group_size=3, max_turns=4, max_rows=rows)) == wanted
        monkeypatch.setattr(play, "LUMP", lump)
        assert ids_of(play_all(p, Slow, group_size=3, max_turns=4, max_rows=rows)) == wanted
        monkeypatch.undo()
    first = rollout(p, TASKS, group_size=3, sampling=SHORT)
    assert [one.turns[0].tokens for one in flat(first)] == [one[0][1] for group in wanted for one in group]


def test_forwards_are_those_that_are_needed(monkeypatch):
    """8 x 4 rows of 4 turns: a prefill a turn, and as many steps as the longest row has tokens, less the first."""
    p, calls = a_policy(more=0), []
    play_all(p, tasks=TASKS[:1])  # finds out how the model is served

    def counted(name):
        method = getattr(Subject, name)

        def called(self, *arguments):
            calls.append(name)
            return method(self, *arguments)

        monkeypatch.setattr(Subject, name, called)

    for name in ("prefill", "extend", "step"):
        counted(name)
    tasks = [Task(f"question {number}" + "?" * number) for number in range(8)]
    groups = play_all(p, tasks=tasks, group_size=4, sampling=Sampling(max_tokens=9), max_turns=4)
    assert {len(one.turns) for one in flat(groups)} == {4}
    assert calls == [*["prefill", *["step"] * 8], *["extend", *["step"] * 8] * 3]


# What an episode is


def test_a_turns_state_is_the_one_it_was_taken_in():
    """Not the one it led to; and tasks have no state in common."""

    class Walk:
        def reset(self, task):
            self.place = 0
            return task.prompt

        def step(self, reply):
            self.place += 1 + len(reply) % 2
            return Feedback(f"at {self.place}", reward=-1.0, state=self.place, done=self.place > 4)

    groups = play_all(a_policy(), Walk, tasks=[Task("go"), Task("run")], group_size=4, max_turns=6)
    for one in flat(groups):
        places = [0]
        for turn in one.turns:
            places.append(places[-1] + 1 + len(turn.text) % 2)
        assert [turn.state for turn in one.turns] == [one.prompt, *places[1:-1]]
        assert [turn.observation_text for turn in one.turns[1:]] == [f"at {place}" for place in places[1:-1]]
        assert (one.stop, one.reward) == ("done", -float(len(one.turns)))
        assert (one.rewards, one.weights) == ({"environment": one.reward}, {"environment": 1.0})
    first, second = ({one.turns[0].state for one in group} for group in groups)
    assert len(first) == len(second) == 1
    assert first != second


def test_episodes_end_at_their_limits():
    p = a_policy(more=0, max_position_embeddings=64)
    tasks = [Task("hello")]
    (group,) = play_all(p, tasks=tasks, max_turns=2)
    assert [(one.stop, len(one.turns), one.length) for one in group] == [("length", 2, 12)] * 2  # the last was cut
    (group,) = play_all(p, tasks=tasks, max_turns=8, max_episode_tokens=15)
    assert [[len(turn.tokens) for turn in one.turns] for one in group] == [[6, 6, 3]] * 2
    assert {one.stop for one in group} == {"length"}
    (group,) = play_all(p, tasks=tasks, max_turns=8)
    for one in group:
        assert one.stop == "length"
        assert 64 - 20 < sum(len(turn.observation) + len(turn.tokens) for turn in one.turns) <= 64
    (group,) = play_all(p, tasks=[Task("x" * 70)], max_turns=8)
    assert [(one.stop, one.length, one.reward) for one in group] == [("length", 0, 0.0)] * 2
    (group,) = play_all(a_policy(), tasks=tasks, sampling=Sampling(max_tokens=90), max_turns=2)
    assert {one.stop for one in group} == {"turns"}


def test_texts_of_an_environment_end_its_actions_and_special_tokens_reach_it_where_it_wants_them():
    p, replies = a_policy(more=0), []
    plain = play_all(p, tasks=[Task("hello")], sampling=Sampling(max_tokens=30), max_turns=1)[0]
    letters = [next(x for x in one.turns[0].text[3:] if x.isascii() and x.isalnum()) for one in plain]

    class Stops(Counting):
        special_tokens = True
        stop = tuple(letters)

        def step(self, reply):
            replies.append(reply)
            return super().step(reply)

    (group,) = play_all(p, Stops, tasks=[Task("hello")], sampling=Sampling(max_tokens=30), max_turns=3)
    firsts = [one.turns[0].text for one in group]
    assert [sum(text.count(letter) for letter in set(letters)) for text in firsts] == [1, 1]
    assert all(text.endswith(tuple(letters)) for text in firsts)
    assert all(len(text) < len(one.turns[0].text) for text, one in zip(firsts, plain, strict=True))
    eos = p.tokenizer.eos_token_ids
    made = [p.tokenizer.decode([i for i in turn.tokens if i not in eos]) for one in group for turn in one.turns]
    assert sorted(replies) == sorted(made)
    for one in group:  # a text has no stop token behind it, so the template's follows
        assert p.tokenizer.decode(one.turns[1].observation).startswith("<end>\n<user>turn !")


def test_an_invalid_action_costs_its_turn():
    class Picky(Counting):
        def step(self, reply):
            return replace(super().step(reply), reward=2.0, invalid=self.turn == 2)

    (group,) = play_all(a_policy(), Picky, tasks=TASKS[:1], max_turns=4, invalid_penalty=0.5)
    assert [[(turn.reward, turn.invalid) for turn in one.turns] for one in group] == [
        [(2.0, False), (1.5, True), (2.0, False)]
    ] * 2
    assert [one.reward for one in group] == [5.5] * 2


def test_reward_functions_come_on_top():
    groups = play_all(a_policy(), max_turns=2)
    scored = score(groups, Reward(functions=(lambda completions, **_: [1.0] * len(completions),), weights=(0.5,)))
    for one, before in zip(flat(scored), flat(groups), strict=True):
        assert one.rewards == {"environment": before.reward, "<lambda>": 1.0}
        assert one.reward == before.reward + 0.5
    assert score(scored) == groups  # and without a function the return is all
    assert [one.reward for one in flat(score(score(groups)))] == [one.reward for one in flat(groups)]


# Environments that fail


class Failing(Counting):
    """Fails as its task says, in its second turn."""

    closed = threading.Semaphore(0)

    def reset(self, task):
        if task.prompt == "reset":
            raise RuntimeError("no\nworld")
        return {"prompt": 3}.get(task.prompt, super().reset(task))

    def step(self, reply):
        feedback = super().step(reply)
        if self.turn < 2:
            return feedback
        return {
            "raise": lambda: 1 / 0, "hang": lambda: time.sleep(60), "exit": sys.exit, "text": lambda: "fine",
            "reward": lambda: replace(feedback, reward=math.nan), "state": lambda: replace(feedback, state=[]),
            "large": lambda: replace(feedback, reward=1e308), "odd": lambda: replace(feedback, state=Odd()),
            "done": lambda: replace(feedback, done=1), "invalid": lambda: replace(feedback, invalid="no"), "mute": mute,
            "content": lambda: replace(feedback, observation=({"role": "user", "content": Mute()},)),
        }.get(self.task.prompt, lambda: feedback)()  # fmt: skip

    def close(self):
        self.closed.release()


FAULTS = {
    "reset": "reset: RuntimeError: no world",
    "prompt": "reset: TypeError: wanted a text or a list of messages as reset, got int 3",
    "raise": "step: ZeroDivisionError: division by zero",
    "hang": "step: no answer in 0.3 s",
    "exit": "step: SystemExit",
    "text": "step: TypeError: wanted a Feedback, got str 'fine'",
    "reward": "step: TypeError: wanted a number from -1e+30 to 1e+30 as reward, got float nan",
    "large": "step: TypeError: wanted a number from -1e+30 to 1e+30 as reward, got float 1e+308",
    "state": "step: TypeError: state: wanted a hashable value, such as a tuple, got list",
    "odd": "step: RuntimeError: not comparable",
    "done": "step: TypeError: done: wanted True or False, got int 1",
    "invalid": "step: TypeError: invalid: wanted True or False, got str 'no'",
    "mute": "step: Mute: its message cannot be shown",
    "content": "step: KeyError",
}


class Odd:
    def __hash__(self):
        return 1

    def __eq__(self, other):
        raise RuntimeError("not comparable")


class Mute(Exception):
    def __str__(self):
        raise KeyError


def mute():
    raise Mute


def test_one_that_fails_ends_its_own_episode():
    p, tasks = a_policy(), [Task("good"), *map(Task, FAULTS)]
    begun = time.monotonic()
    groups = play_all(p, Failing, tasks=tasks, max_turns=3, timeout=0.3)
    assert time.monotonic() - begun < 20
    for group in groups[1:]:
        name = group[0].task.prompt
        for one in group:
            assert (one.stop, one.error) == ("error", FAULTS[name])
            assert math.isnan(one.reward)
            assert len(one.turns) == (0 if name in ("reset", "prompt") else 2)
    assert all(len(one.turns) == 3 and not one.error and one.reward > 0 for one in groups[0])
    for _ in range(2 * len(tasks)):
        assert Failing.closed.acquire(timeout=5)
    assert not Failing.closed.acquire(blocking=False)
    groups = score(groups)
    metrics = Step(0, {}, groups).metrics
    assert metrics["episodes/errors"] == 28
    assert (metrics["episodes/error"], metrics["episodes/close_errors"]) == (FAULTS["reset"], 0)
    assert (metrics["stops/error"], metrics["reward/failed"]) == (28 / 30, 0)
    for recipe in (algo.rloo(), algo.grpo(), algo.gigpo()):
        assert {row for part in pack(groups, recipe) for row in part.trajectories} <= {0, 1}


def test_where_all_fail_it_is_said_in_a_line():
    with pytest.raises(
        EpisodeError, match=r"^environment: failed in each of 2 episodes: reset: RuntimeError: no world$"
    ):
        play_all(a_policy(), Failing, tasks=[Task("reset")])

    def broken():
        raise OSError("no display")

    with pytest.raises(EpisodeError, match="failed in each of 6 episodes: reset: OSError: no display"):
        play_all(a_policy(), broken)


class Bare:
    tools = ()

    def reset(self, task):
        return task.prompt

    def step(self, reply):
        return Feedback(done=True)


class Unlocked(Bare):
    @property
    def close(self):
        raise OSError("no door")


class Offering(Bare):
    tools = (object(),)


@pytest.mark.parametrize(
    ("factory", "error"),
    [
        (lambda: 5, "reset: TypeError: the factory gave an int; wanted an object with reset and step"),
        (lambda: "m:Maze", "reset: TypeError: the factory gave a str; wanted an object with reset and step"),
        (Unlocked, "reset: OSError: no door"),
        (Offering, "reset: TypeError: tools: wanted schemas of functions, got object <object"),
    ],
)
def test_what_is_no_environment_is_said_in_a_line(factory, error):
    with pytest.raises(EpisodeError) as caught:
        play_all(a_policy(), factory)
    assert f"failed in each of 6 episodes: {error}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"environment": Counting()}, "rollout: environment: wanted a class or a function that makes an environment"),
        ({"environment": "m:Maze"}, "got str 'm:Maze'"),
        ({"environment": 5}, "got int 5"),
        ({"environment": lambda size: Counting()}, "missing a required argument: 'size'; it takes size"),
        ({"max_turn": 3}, "rollout: unknown argument 'max_turn'; did you mean 'max_turns'?"),
        ({"colour": 3}, "rollout: unknown argument 'colour'"),
    ],
)
def test_what_cannot_be_played_is_refused_before_it_is(given, error):
    with pytest.raises(ValueError) as caught:
        play_all(a_policy(), **{"environment": Counting, **given})
    assert error in str(caught.value)


def test_a_misspelt_keyword_of_train_is_told_from_its_own():
    with pytest.raises(ValueError, match="train: unknown argument 'tokens_per_pas'; did you mean 'tokens_per_pass'"):
        next(train(a_policy(), TASKS, algo.grpo(), reward=len, steps=1, tokens_per_pas=3))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_turns", 2.5), ("max_turns", "3"), ("max_turns", None), ("max_episode_tokens", True), ("timeout", None),
        ("timeout", "3"), ("timeout", 1e7), ("timeout", math.nan), ("invalid_penalty", 1e308), ("invalid_penalty", "1"),
    ],
)  # fmt: skip
def test_bounds_of_a_wrong_type_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^environment: {name}: wanted .*, got {value!r}$".replace("+", r"\+")):
        play.Bounds(**{name: value})


def test_attempts_share_neither_task_nor_arguments():
    """Each finds 3 doors in its task, and 2 walls in its arguments; what is scored is the task that was given."""

    found = []

    class Taker(Bare):
        def __init__(self, walls):
            self.walls = walls

        def reset(self, task):
            found.append((len(task.columns["doors"]), len(self.walls), task.prompt[0]["content"]))
            task.columns["doors"].pop()
            task.columns["more"] = self.walls.pop()
            task.prompt[0]["content"] = "?"
            return task.prompt

    task = Task(({"role": "user", "content": "go"},), {"doors": [1, 2, 3]})
    walls = [1, 2]
    (group,) = play_all(a_policy(), Copying(Taker, walls=walls), tasks=[task], group_size=3)
    assert found == [(3, 2, "go")] * 3
    assert all(one.task is task for one in group)
    assert (task, walls) == (Task(({"role": "user", "content": "go"},), {"doors": [1, 2, 3]}), [1, 2])


def test_what_fails_or_hangs_in_closing_is_told_and_not_waited_for_again(monkeypatch):
    monkeypatch.setattr(play, "CLOSING", 0.6)
    free = threading.Event()

    class Stuck(Bare):
        def close(self):
            free.wait(30)

    class Torn(Bare):
        def close(self):
            raise OSError("gone")

    def seconds(factory):
        begun = time.monotonic()
        groups = play_all(p, factory, tasks=TASKS[:1])
        return time.monotonic() - begun, Step(0, {}, groups).metrics

    p = a_policy()
    _, metrics = seconds(Bare)
    assert metrics["episodes/close_errors"] == 0
    _, metrics = seconds(Torn)
    assert (metrics["episodes/close_errors"], metrics["episodes/close_error"]) == (2, "close: OSError: gone")
    assert shown(metrics, 1, 1, []).warnings == ("2 environments could not be closed, the first: close: OSError: gone",)
    first, metrics = seconds(Stuck)
    assert metrics["episodes/close_error"] == "close: no answer in 0.6 s"
    assert first > 0.6
    second, metrics = seconds(Stuck)
    assert metrics["episodes/close_error"] == "close: no answer in 0.2 s"
    assert second < 0.6
    free.set()
    time.sleep(0.1)
    monkeypatch.setattr(play, "CLOSING", 5.0)
    assert seconds(Bare)[1]["episodes/close_errors"] == 0
    assert not any(not call.done for call in play._hanging)


def test_a_system_without_threads_fails_calls_and_not_the_run(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    pool = Pool(5.0, workers=2)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        call = pool.submit(lambda: 7)
        assert pool.wait(grace=None) == [call]
        assert fault_of(call, "reset", 5.0) == "reset: RuntimeError: can't start new thread"
    assert (later := pool.submit(lambda: 8)) in pool.wait(grace=None)
    assert (call.value, later.value) == (None, 8)
    pool.close(1.0)


def test_prompts_that_fill_the_context_are_told():
    p = a_policy(max_position_embeddings=32)
    (step,) = train(p, [Task("x" * 70)], algo.grpo(), steps=1, tasks_per_step=1, group_size=2, environment=Counting)
    warnings = shown(step.metrics, 1, 1, []).warnings
    assert "nothing was sampled: the prompt fills the context of 32 tokens" in warnings


@pytest.mark.parametrize("lump", [0.1, 2.0])
def test_nobody_waits_for_a_slow_environment(monkeypatch, lump):
    """The others come to their ends while it thinks, few or many."""
    monkeypatch.setattr(play, "LUMP", lump)
    ended = []

    class Thinks(Counting):
        def step(self, reply):
            if self.task.prompt == "slow":
                time.sleep(1.0)
            elif self.turn == 2:
                ended.append(time.monotonic())
            return super().step(reply)

    p = a_policy()
    play_all(p, max_turns=3)
    begun = time.monotonic()
    groups = play_all(p, Thinks, tasks=[Task("slow"), Task("quick")], group_size=1, max_turns=3)
    assert [len(one.turns) for one in flat(groups)] == [3, 3]
    assert max(ended) - begun < 1.0


def test_a_thread_that_hangs_does_not_keep_the_process():
    code = (
        "import time; from mlxrl.rollout.pool import Pool; pool = Pool(0.2, workers=2)\n"
        "calls = [pool.submit(lambda: time.sleep(600)) for _ in range(4)] + [pool.submit(lambda: 7)]\n"
        "told = pool.wait(grace=None); pool.close(0.1); print([call.late for call in told], told[-1].value)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "[True, True, True, True, False] 7", done.stderr


def test_calls_that_have_ended_are_waited_for_together():
    pool = Pool(5.0, workers=3)
    quick = [pool.submit(lambda: time.sleep(0.02)) for _ in range(3)]
    assert pool.wait() == quick
    slow, quick = pool.submit(lambda: time.sleep(0.5)), pool.submit(lambda: None)
    assert pool.wait() == [quick]
    assert pool.wait() == [slow]
    assert pool.wait() == []
    slow, begun = pool.submit(lambda: time.sleep(0.6)), time.monotonic()
    assert pool.wait(some=True) == []
    assert time.monotonic() - begun < 0.5
    assert pool.wait(grace=None) == [slow]
    pool.close(1.0)


def test_an_interrupted_rollout_has_the_episodes_that_had_ended():
    p = a_policy()
    steps = iter(range(1000))

    def interrupt(tokens, logits):
        if next(steps) > 60:
            raise KeyboardInterrupt
        return logits

    with pytest.raises(Interrupted) as caught:
        play_all(p, max_turns=4, processors=[interrupt])
    assert all(one.stop in ("done", "length", "turns") for one in flat(caught.value.groups))
    assert len(flat(caught.value.groups)) < 6


# Training


def test_a_rewritten_history_is_several_rows_of_one_trajectory():
    p = a_policy(template=TEMPLATE)
    groups = score(play_all(p, tasks=[Task("hi", {"turns": 3})], group_size=2, max_turns=3))
    recipe = algo.rloo()
    batch = pack(groups, recipe)
    assert (batch.totals.sequences, batch.totals.without_signal) == (6, 0)
    assert batch.totals.tokens == sum(one.length for one in groups[0])
    assert sorted(row for part in batch for row in part.trajectories) == [0, 0, 0, 1, 1, 1]
    credits = recipe.advantages(groups)[0]
    for part in batch:
        for place, row in enumerate(part.trajectories):
            mask = np.array(part.mask[place]) > 0
            assert np.allclose(np.array(part.advantages[place])[mask], credits[row])
            assert np.allclose(
                np.array(logprobs(p, part).token_logprobs[place])[mask],
                np.array(part.sampler_logprobs[place])[mask],
                atol=1e-4,
            )
    first = groups[0][0]
    per_token = [float(place) for place in range(first.num_sampled)]
    rows = rows_of(0, first, per_token)
    assert np.concatenate([row.advantage[row.mask > 0] for row in rows]).tolist() == per_token
    split = pack(groups, recipe, tokens_per_pass=1)
    grads = [dict(tree_flatten(gradient(p, one, recipe)[1])) for one in (batch, split)]
    assert all(mx.allclose(grads[0][name], grads[1][name], rtol=1e-4, atol=1e-6) for name in grads[0])


def test_attempts_that_begin_differently_do_not_share_a_prompt():
    """Those of one group that begin alike do, from 128 saved tokens on."""
    letters, prizes = iter("aabab"), iter([0.0, 1.0, 2.0, 4.0, 8.0])  # none is the mean of the others

    class Dealt(Counting):
        def reset(self, task):
            super().reset(task)
            return next(letters) * 150

        def step(self, reply):
            feedback = super().step(reply)
            return replace(feedback, reward=next(prizes) if feedback.done else 0.0)

    groups = play_all(a_policy(), Dealt, tasks=[Task("?", {"turns": 2})], group_size=5)
    batch = pack(groups, algo.rloo())
    ids = [[*one.prompt, *one.turns[0].tokens, *one.turns[1].observation, *one.turns[1].tokens] for one in groups[0]]
    found = {}
    for part in batch:
        for row, tokens in zip(part.trajectories, part.tokens.tolist(), strict=True):
            found[row] = [*part.prefix.tolist(), *tokens][: len(ids[row])]
    assert found == dict(enumerate(ids))
    assert sorted(part.prefix.size > 0 for part in batch) == [True, True]


class Longer(Counting):
    """Wants long answers."""

    def reset(self, task):
        return [{"role": "system", "content": "be long"}, {"role": "user", "content": super().reset(task)}]


@pytest.mark.parametrize("recipe", [algo.grpo, algo.gigpo])
@pytest.mark.parametrize("template", [NEWLINE, TEMPLATE])
def test_training_needs_no_reward_function(recipe, template):
    p = a_policy(template=template)
    tasks = [Task(text, {"turns": 2}) for text in ("one", "two", "three")]
    options = {"sampling": SHORT, "tasks_per_step": 2, "group_size": 3, "environment": Longer, "max_turns": 3}
    steps = list(train(p, tasks, recipe(), steps=2, minibatches=2, **options))
    for step in steps:
        assert step.metrics["policy/updates"] > 0
        assert step.metrics["episodes/turns"] == 2
        assert step.metrics["episodes/rewritten"] == (6 if template is TEMPLATE else 0)
        assert (step.metrics["stops/done"], step.metrics["episodes/errors"]) == (1.0, 0.0)
    found = evaluate(p, tasks, sampling=replace(SHORT, temperature=0.0), environment=Longer)
    assert found.rewards == tuple(sum(len(turn.text) for turn in one.turns) for one in found.trajectories)


def test_what_has_no_effect_is_refused():
    p = a_policy()
    with pytest.raises(ValueError, match="rollout: max_turns has no effect without an environment"):
        rollout(p, TASKS, group_size=1, max_turns=3)
    with pytest.raises(ValueError, match="rollout: timeout has no effect without an environment"):
        next(train(p, TASKS, algo.grpo(), reward=len, steps=1, timeout=3))
    for name, value in (("max_turns", 0), ("max_episode_tokens", 0), ("timeout", 0), ("invalid_penalty", -1)):
        with pytest.raises(ValueError, match=f"environment: {name}: wanted"):
            play_all(p, **{name: value})
    with pytest.raises(ValueError, match="grpo learns from rewards"):
        next(train(p, TASKS, algo.grpo(), steps=1))


# The command line, on the model in examples/

CONFIG = f"""
steps = 2
[model]
id = "{EXAMPLE}"
[data]
train = "{EXAMPLE}/train.jsonl"
evaluation = "{EXAMPLE}/test.jsonl"
prompt = "question"
[environment]
factory = "worlds.py:Sum"
arguments = {{ tries = 2 }}
max_turns = 3
timeout = 5
invalid_penalty = 0.25
[rollout]
tasks_per_step = 3
group_size = 4
max_tokens = 16
[optimizer]
learning_rate = 1e-3
[evaluation]
rows = 8
[run]
folder = "out/run"
samples_every = 1
"""

WORLDS = """
from mlxrl import Feedback
from mlxrl.rewards import last_number


class Sum:
    def __init__(self, tries: int, text: str = "no"):
        self.tries, self.text = tries, text

    def reset(self, task):
        if self.text == "raise":
            raise KeyError("no table")
        self.answer, self.left = last_number(task.columns["answer"]), self.tries
        return task.prompt

    def step(self, reply):
        right, self.left = last_number(reply) == self.answer, self.left - 1
        if self.text == "sometimes" and not right:
            raise ValueError("cannot\\x1b[31m go on")
        return Feedback(self.text, float(right), right or not self.left, self.left, last_number(reply) is None)


class Other:
    pass


class Wanting(Sum):
    def __init__(self, size, tries):
        pass


nothing = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "worlds.py").write_text(WORLDS)
    return tmp_path


def test_a_run_with_an_environment(folder, capsys):
    assert main(["train", "--config", "run.toml"]) == 0
    out, run = capsys.readouterr().out, folder / "out/run"
    assert "environment  worlds.py:Sum(tries=2), at most 3 turns" in out
    assert "3 prompts x 4 completions = 12 rows of at most 16 tokens a turn, 1 update" in out
    lines, samples = read_lines(run / "metrics.jsonl"), read_lines(run / "samples.jsonl")
    assert all(1 <= line["episodes/turns"] <= 2 and line["episodes/errors"] == 0 for line in lines)
    assert all(line["stops/done"] == 1.0 for line in lines)
    for sample in samples:
        turns = sample["turns"]
        assert turns[0]["observation"] == sample["prompt"]
        assert [turn["observation"] for turn in turns[1:]] == ["no"] * (len(turns) - 1)
        assert sample["completion"] == "\n".join(turn["action"] for turn in turns)
        assert sample["reward"] == sum(turn["reward"] for turn in turns) == sample["rewards"]["environment"]
    assert any(len(sample["turns"]) == 2 for sample in samples)
    assert " [no] " in out
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert main(["eval", "--config", str(run / "config.toml"), "--adapter", "out/run/adapters"]) == 0
    assert f"accuracy {evaluation['after']['accuracy']:.4f}" in capsys.readouterr().out
    known = tomllib.loads((run / "config.toml").read_text())["environment"]
    assert known == {
        "factory": f"{folder}/worlds.py:Sum", "arguments": {"tries": 2}, "max_turns": 3, "timeout": 5.0,
        "invalid_penalty": 0.25,
    }  # fmt: skip


def test_reward_functions_stand_beside_an_environment(folder):
    settings = ['reward.functions=["mlxrl.rewards:last_number_matches"]', "reward.weights=[0.5]", "steps=1"]
    assert main(["train", "--config", "run.toml", *settings]) == 0
    for sample in read_lines(folder / "out/run/samples.jsonl"):
        parts = sample["rewards"]
        assert sample["reward"] == parts["environment"] + 0.5 * parts["last_number_matches"]


def test_environments_that_fail_are_shown_once_a_step(folder, capsys):
    assert main(["train", "--config", "run.toml", "environment.arguments.text=sometimes"]) == 0
    out, lines = capsys.readouterr().out, read_lines(folder / "out/run/metrics.jsonl")
    failed = [line for line in lines if line["episodes/errors"]]
    assert failed
    assert out.count("episodes ended because their environment failed, the first: step: ValueError: cannot") == len(
        failed
    )
    assert "\x1b[31m" not in out


@pytest.mark.parametrize(
    ("setting", "piece"),
    [
        (
            "factory=worlds.py:Nothing",
            "environment: factory: 'worlds.py:Nothing': worlds.py has no 'Nothing'; did you mean",
        ),
        ("factory=nowhere.py:Sum", "environment: factory: no file 'nowhere.py' beside the config"),
        ("factory=worlds.py", "environment: factory: 'worlds.py': wanted 'module:name' or 'file.py:name'"),
        ("factory=worlds.py:nothing", "wanted a class or a function that makes an environment, got int 3"),
        ("factory=bad.py:Sum", "bad.py:Sum': cannot be imported: ZeroDivisionError: division by zero"),
        ("arguments={trys=2}", "arguments: got an unexpected keyword argument 'trys'; did you mean 'tries'?"),
        ("arguments={tries=2, colour=1}", "unexpected keyword argument 'colour'; it takes tries, text"),
        ("arguments.text=raise", "environment: failed in each of 8 episodes: reset: KeyError: 'no table'"),
        ("max_turns=0", "environment: max_turns: wanted at least 1, got 0"),
        ("max_turn=3", "environment: unknown key 'max_turn'; did you mean 'max_turns'?"),
        ("factory=worlds.py:Other", "command line: environment: arguments: got an unexpected keyword argument 'tries'"),
        ("arguments.trys=2", "command line: environment: arguments: got an unexpected keyword argument 'trys'; did"),
        ("factory=worlds.py:Wanting", "command line: environment: arguments: missing a required argument: 'size'"),
        ("timeout=1e7", "environment: timeout: wanted more than 0 and at most 1000000, got"),
        ("invalid_penalty=1e308", "environment: invalid_penalty: wanted at least 0 and at most 1e+30, got"),
    ],
)
def test_faults_of_an_environment_are_one_line(folder, capsys, setting, piece):
    (folder / "bad.py").write_text("1 / 0\n")
    for command in ("train", "eval"):
        assert main([command, "--config", "run.toml", f"environment.{setting}"]) == 2
        err = capsys.readouterr().err
        assert piece in err.replace(f"{folder}/", "")
        assert err.count("\n") == 1


def test_settings_of_an_environment_need_one(folder, capsys):
    lines = CONFIG.splitlines()
    (folder / "run.toml").write_text("\n".join(line for line in lines if not line.startswith(("factory", "arguments"))))
    assert main(["train", "--config", "run.toml"]) == 2
    assert "environment: max_turns: has no effect without environment.factory" in capsys.readouterr().err
    (folder / "run.toml").write_text(CONFIG)
    assert main(["train", "--config", "run.toml", "reward.overlong_buffer=4"]) == 2
    assert "reward: overlong_buffer: wanted 0 with an environment" in capsys.readouterr().err
