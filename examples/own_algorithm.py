"""An algorithm of one's own in one file, by what `rl.Algorithm` says: hard tasks count more, and nothing is clipped.

python examples/own_algorithm.py                                          from the root of the repository
mlxrl train --config examples/arithmetic.toml algorithm.name=own_algorithm.py:make algorithm.power=2
"""

import mlx.core as mx

import mlxrl as rl


def policy_gradient(new, old, advantages, mask):
    return -advantages * mx.exp(new - old)


def make(*, power=1.0, terms=()):
    def credit(groups):  # the reward less its group's mean, times a power of the digits of the answer
        means = [sum(one.reward for one in group) / len(group) for group in groups]
        hard = [len(group[0].task.columns["answer"]) ** power for group in groups]
        return [[h * (one.reward - mean) for one in group] for group, mean, h in zip(groups, means, hard)]

    return rl.Algorithm("hard_tasks_first", credit, policy_gradient, rl.algo.reduce.token_mean, tuple(terms))


if __name__ == "__main__":
    policy = rl.load("examples/arithmetic", lora=rl.LoRA(rank=8))
    tasks = rl.tasks("examples/arithmetic/train.jsonl", prompt="question")
    for step in rl.run(policy, tasks, make(), reward=rl.rewards.last_number_matches, steps=3):
        print(step)
