"""Makes `examples/boxed/`: demonstrations of a format that the model of `examples/arithmetic` never emits.

    python examples/make_boxed.py

The demonstrations are the homework of the same sloppy pupils, with brackets around the answer:

    847+356=?   13 10 12: [1203]    a correct one
    847+356=?   13 9 11: [1193]     one that forgot a carry

Supervised fine-tuning learns the brackets from them, and no better sums than the pupils'. `demonstrations.jsonl` has
the first pairs of `arithmetic/train.jsonl`, `test.jsonl` those of its test, each with its answer. Everything follows
from SEED.
"""

import json
import random
from pathlib import Path

from make_arithmetic import homework

SEED = 0
DEMONSTRATIONS = 256
HERE = Path(__file__).parent
FOLDER = HERE / "boxed"


def demonstration(rng, row):
    """A row with a pupil's solution, in brackets."""
    a, b = row["question"].removesuffix("=?").split("+")
    columns, said = homework(rng, int(a), int(b)).split(": ")
    return {**row, "completion": f"{columns}: [{said}]"}


def main():
    """Writes both files."""
    rng = random.Random(SEED)
    FOLDER.mkdir(exist_ok=True)
    for source, name, most in (("train", "demonstrations", DEMONSTRATIONS), ("test", "test", None)):
        lines = (HERE / "arithmetic" / f"{source}.jsonl").read_text().splitlines()[:most]
        rows = [json.dumps(demonstration(rng, json.loads(line))) for line in lines]
        (FOLDER / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
