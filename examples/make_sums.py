"""Makes `examples/sums/`: one-step sums in words, a first real task for SmolLM2-135M-Instruct.

    python examples/make_sums.py

A row is a chat: four answered sums that show how short an answer should be, then the question.
Without the four, a model this small wanders off and hardly ends by itself; with them it writes
"8 + 5 = 13" about half of the time, and multiplies, tells stories or miscounts otherwise.

The pairs of numbers in train.jsonl, test.jsonl and the examples are disjoint, in either order.
Everything follows from SEED: every run writes the same bytes.
"""

import json
import random
from itertools import combinations_with_replacement
from pathlib import Path

SEED = 0
SMALLEST, LARGEST = 2, 20
TEST_PAIRS, TEST_ROWS, TRAIN_ROWS = 36, 100, 500

FOLDER = Path(__file__).parent / "sums"
NAMES = ("Anna", "Ben", "Eva", "Leo", "Max", "Mia", "Sam", "Sue", "Tom", "Zoe")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens")
STORIES = (
    "{name} has {a} {things} and gets {b} more. How many now?",
    "{name} saw {a} {things} on Monday and {b} on Tuesday. How many in all?",
    "{a} {things} are on the table and {b} in the box. How many in all?",
    "{name} buys {a} {things} and then buys {b} more. How many in all?",
)
EXAMPLES = (
    ("Kim has 3 cakes and gets 4 more. How many now?", 3, 4),
    ("12 birds are on the roof and 5 in the tree. How many in all?", 12, 5),
    ("Jim saw 6 cars on Monday and 14 on Tuesday. How many in all?", 6, 14),
    ("Kim buys 9 nuts and then buys 2 more. How many in all?", 9, 2),
)


def message(role, content):
    """Makes one message of a chat."""
    return {"role": role, "content": content}


def examples():
    """Makes the eight messages with which every row begins."""
    messages = []
    for question, a, b in EXAMPLES:
        messages += [message("user", question), message("assistant", f"{a} + {b} = {a + b}")]
    return messages


def draw_row(rng, pairs):
    """Draws a row: one of the pairs in either order, in a story."""
    a, b = rng.sample(rng.choice(pairs), 2)
    story = rng.choice(STORIES).format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
    return {"question": [*examples(), message("user", story)], "answer": str(a + b)}


def draw_rows(rng, pairs, count):
    """Draws `count` different rows."""
    rows = {}
    while len(rows) < count:
        row = draw_row(rng, pairs)
        rows[json.dumps(row)] = row
    return list(rows.values())


def write_rows(name, rows):
    """Writes one row a line."""
    FOLDER.mkdir(exist_ok=True)
    lines = (json.dumps(row) + "\n" for row in rows)
    (FOLDER / name).write_text("".join(lines), encoding="utf-8")


def main():
    """Splits the pairs of numbers and writes both files."""
    rng = random.Random(SEED)
    shown = {frozenset(example[1:]) for example in EXAMPLES}
    numbers = range(SMALLEST, LARGEST + 1)
    pairs = [pair for pair in combinations_with_replacement(numbers, 2) if frozenset(pair) not in shown]
    rng.shuffle(pairs)
    write_rows("test.jsonl", draw_rows(rng, pairs[:TEST_PAIRS], TEST_ROWS))
    write_rows("train.jsonl", draw_rows(rng, pairs[TEST_PAIRS:], TRAIN_ROWS))


if __name__ == "__main__":
    main()
