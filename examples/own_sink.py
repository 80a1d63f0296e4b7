"""A sink of one's own: the steps of a run as a table that a spreadsheet opens.

python examples/own_sink.py                                                       from the root of the repository
mlxrl train --config examples/arithmetic.toml 'run.sinks=["own_sink.py:make"]'    in the folder of the run
"""

import mlxrl as rl


class Table(rl.Sink):
    def __init__(self, names):
        self.path, self.names = "steps.csv", names

    def begin(self, run):  # a sink may have `evaluation` and `end`, too
        self.path = run.folder / self.path

    def step(self, step):
        with open(self.path, "a") as file:
            print(step.number, *(step.metrics.get(name, "") for name in self.names), sep=",", file=file)


def make():
    return Table(["reward", "loss", "grad_norm", "completions/mean_length"])


if __name__ == "__main__":
    policy, sink = rl.load("examples/arithmetic"), make()
    tasks = rl.tasks("examples/arithmetic/train.jsonl", prompt="question")
    for step in rl.run(policy, tasks, rl.grpo(), reward=rl.rewards.last_number_matches, steps=3):
        sink.step(step)
