"""Makes `examples/maze/`: a tiny model that walks through mazes without much sense, and its mazes.

    python examples/make_maze.py

The model is that of make_arithmetic.py, pretrained on the walks of idlers through mazes of nine places, who take an
open door that leads nearer to the goal now and then, and any other most of the time:

    to C2. at A1: es    e    at B1: sw    w    at A1: es    s    ...

What is left to reinforcement learning is to mind the goal, and where one has been. The mazes of pretraining,
train.jsonl and test.jsonl are drawn from different seeds, and none of the test is among the others. Everything follows
from SEED. It takes ten minutes on one core with OpenBLAS.
"""

import random
from pathlib import Path

import make_arithmetic as base
import mlx.core as mx
from environments.maze import Maze, beyond, distance, maze_tasks, placed, write

SEED = 0
STEPS, ROWS = 700, 48
TRAIN, TEST = 512, 200
TURNS, WIDTH = 8, 160  # moves of a walk, and tokens of a sequence
NEARER, BLIND = 0.25, 0.08  # how often an idler minds the goal, and how often not even the walls

FOLDER = Path(__file__).parent / "maze"


def idle(rng, environment, doors, goal):
    """The next move of an idler."""
    if rng.random() < BLIND:
        return rng.choice("nesw")
    place = placed(environment.place)
    moves = sorted(doors[place])
    if rng.random() < NEARER:
        moves = [move for move in moves if distance(doors, beyond(place, move), goal) < distance(doors, place, goal)]
    return rng.choice(moves)


def walk(rng, task):
    """A walk: what is read and what is written, in turn."""
    environment = Maze()
    doors = {placed(name): set(ways) for name, ways in task.columns["doors"].items()}
    goal = placed(task.columns["goal"])
    texts = [environment.reset(task)]
    for _ in range(TURNS):
        move = idle(rng, environment, doors, goal)
        feedback = environment.step(move)
        texts += [move, feedback.observation]
        if feedback.done:
            break
    return texts[:-1]


def encode(tokenizer, texts):
    """Ids of a walk as the chat template writes it, and for each whether the idler wrote it."""
    ids, written = [], []
    for number, text in enumerate(texts):
        role = base.ROLES[1 + number % 2]
        parts = [tokenizer.token_to_id(role)], tokenizer.encode(text + base.END).ids
        ids += parts[0] + parts[1]
        written += [False] + [bool(number % 2)] * len(parts[1])
    return ids, written


def draw_batch(tokenizer, rng, reserved):
    """Walks through fresh mazes, tokens [B, T] right-padded, and the mask [B, T] of what the idlers wrote."""
    rows, masks = [], []
    while len(rows) < ROWS:
        (task,) = maze_tasks(1, seed=rng.getrandbits(32))
        if task_key(task) in reserved:
            continue
        ids, written = encode(tokenizer, walk(rng, task))
        pad = max(0, WIDTH - len(ids))
        rows.append((ids + [tokenizer.token_to_id(base.PAD)] * pad)[:WIDTH])
        masks.append((written + [False] * pad)[:WIDTH])
    return mx.array(rows), mx.array(masks)


def task_key(task):
    """What two mazes must share to be the same task."""
    return task.prompt, tuple(sorted(task.columns["doors"].items()))


def main():
    """Draws the mazes, trains the model and writes the folder."""
    test = list({task_key(task): task for task in maze_tasks(2 * TEST, seed=SEED + 1)}.values())[:TEST]
    reserved = {task_key(task) for task in test}
    train = [task for task in maze_tasks(2 * TRAIN, seed=SEED + 2) if task_key(task) not in reserved][:TRAIN]
    tokenizer = base.make_tokenizer()
    config = base.make_config(tokenizer)
    model = base.make_model(config)
    rng = random.Random(SEED)
    base.pretrain(model, lambda: draw_batch(tokenizer, rng, reserved), STEPS)

    FOLDER.mkdir(exist_ok=True)
    write(FOLDER / "train.jsonl", train)
    write(FOLDER / "test.jsonl", test)
    base.write_tokenizer(tokenizer, FOLDER)
    base.write_model(model, config, FOLDER)


if __name__ == "__main__":
    main()
