"""The adapters in `examples/` to the environments of other libraries, on those libraries."""

from __future__ import annotations

import random
from typing import Any

import pytest

from helpers import a_policy
from mlxrl.rollout.episodes import rollout
from mlxrl.settings import Sampling
from mlxrl.types import Feedback, Task
from models import dense


@pytest.fixture(scope="module")
def arena() -> Any:
    pytest.importorskip("textarena")
    import textarena_env

    return textarena_env


@pytest.fixture(scope="module")
def verifiers() -> Any:
    pytest.importorskip("verifiers.envs.multiturn_env")
    import verifiers_env

    return verifiers_env


class TestTextArena:
    def test_a_game_is_played_by_its_rules(self, arena: Any) -> None:
        """The number is found by halving 1-20, which takes five guesses at most."""
        (task,) = arena.game_tasks("GuessTheNumber-v0", 1, seed=3)
        game = arena.TextArena()
        first = game.reset(task)
        assert "between 1 and 20 within 10 turns" in first
        low, high = 1, 20
        for _ in range(5):
            guess = (low + high) // 2
            got = game.step(f"[{guess}]")
            if got.done:
                break
            assert got.observation in ("The target number is higher.", "The target number is lower.")
            low, high = (guess + 1, high) if "higher" in got.observation else (low, guess - 1)
        assert got == Feedback(reward=1.0, done=True)

    def test_invalid_moves(self, arena: Any) -> None:
        game = arena.TextArena()
        game.reset(Task("GuessTheNumber-v0", {"seed": 3}))
        got = game.step("seven")
        assert got.invalid
        assert not got.done
        assert "You attempted an invalid move" in got.observation
        assert not game.step("[7]").invalid
        game.step("seven")
        got = game.step("seven")
        assert (got.done, got.invalid) == (True, True)
        assert 0 <= got.reward < 1

    def test_boards_are_states(self, arena: Any) -> None:
        games = [arena.TextArena() for _ in range(2)]
        for game in games:
            assert "Frozen Lake" in game.reset(Task("FrozenLake-v0", {"seed": 3}))
        first, second = games[0].step("[right]"), games[1].step("[right]")
        assert first.state is not None
        assert first.state == second.state

    def test_games_draw_from_their_own_seeds_and_leave_ours_alone(self, arena: Any) -> None:
        def secret(seed: int) -> int:
            game = arena.TextArena()
            game.reset(Task("GuessTheNumber-v0", {"seed": seed}))
            return game.game.game_number

        random.seed(5)
        wanted = [random.random() for _ in range(2)]
        random.seed(5)
        got = [random.random()]
        first = secret(1)
        got.append(random.random())
        assert got == wanted
        assert secret(1) == first
        assert len({secret(seed) for seed in range(30)}) > 5

    def test_a_game_of_two(self, arena: Any) -> None:
        """Tic-tac-toe against one who takes the lowest free cell of 3, 4, 6, 7: 0, 1, 2 wins."""
        moves = iter(["[3]", "[4]", "[6]", "[7]"])
        game = arena.TextArena(opponent=lambda observation: next(moves))
        game.reset(Task("TicTacToe-v0", {"seed": 0}))
        assert [game.step(f"[{cell}]").done for cell in (0, 1)] == [False, False]
        assert game.step("[2]") == Feedback(reward=1.0, done=True)

    def test_a_model_can_play(self, arena: Any) -> None:
        p = a_policy(lambda: dense(max_position_embeddings=2048))
        groups = rollout(
            p, arena.game_tasks("GuessTheNumber-v0", 2), group_size=2, environment=arena.TextArena,
            sampling=Sampling(max_tokens=4),
        )  # fmt: skip
        assert {one.stop for group in groups for one in group} == {"done"}
        assert all(one.turns[0].invalid for group in groups for one in group)


def echoing() -> Any:
    """Say a word back twice, then it is over; the rubric counts the right ones, and that it was polite."""
    import verifiers as vf
    from datasets import Dataset

    class Echoing(vf.MultiTurnEnv):
        async def setup_state(self, state: Any, **kwargs: Any) -> Any:
            state["right"] = 0
            return state

        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            state["right"] += messages[-1].content.strip() == state["answer"]
            if len(state["trajectory"]) == 2:
                state["final_env_response"] = [{"role": "user", "content": "bye"}]
            return [{"role": "user", "content": f"again: {state['right']}"}]

    def right(state: Any) -> float:
        return float(state["right"])

    def polite(completion: Any) -> float:
        return float("please" in completion[0].content)

    rows = [{"question": f"say {word}", "answer": word} for word in ("yes", "no")]
    rubric = vf.Rubric(funcs=[right, polite], weights=[1.0, 0.5])
    return Echoing(dataset=Dataset.from_list(rows), rubric=rubric, system_prompt="Repeat.", max_turns=5)


class TestVerifiers:
    def test_an_episode_is_that_of_the_environment(self, verifiers: Any) -> None:
        """One word is right, weight 1, and nothing polite; then both with a "please"."""
        world = verifiers.Verifiers(echoing())
        tasks = world.tasks()
        assert tasks[0].prompt == ({"role": "system", "content": "Repeat."}, {"role": "user", "content": "say yes"})
        episode = world()
        assert [message["content"] for message in episode.reset(tasks[0])] == ["Repeat.", "say yes"]
        assert episode.step("yes") == Feedback(({"role": "user", "content": "again: 1"},))
        assert episode.step("no") == Feedback(reward=1.0, done=True)
        other = world()
        other.reset(tasks[1])
        other.step("no please")
        assert other.step("no") == Feedback(reward=1.5, done=True)

    def test_what_has_tools_is_refused(self, verifiers: Any) -> None:
        with pytest.raises(ValueError, match="verifiers: wanted a MultiTurnEnv without tools, got int"):
            verifiers.Verifiers(3)

    def test_a_model_can_play(self, verifiers: Any) -> None:
        world = verifiers.Verifiers(echoing())
        groups = rollout(
            a_policy(), world.tasks(2), group_size=2, environment=world, sampling=Sampling(max_tokens=4), max_turns=3
        )
        assert {(one.stop, len(one.turns), one.error) for group in groups for one in group} == {("done", 2, "")}
        assert {one.reward for group in groups for one in group} == {0.0}
