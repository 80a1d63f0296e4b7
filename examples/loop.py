"""A training run written with the library's own functions: run it from the root of the repository."""

import mlxrl as rl

policy = rl.load("examples/arithmetic", lora=rl.LoRA(rank=8))
tasks = rl.tasks("examples/arithmetic/train.jsonl", prompt="question")


def correct(completions, answer, **_):  # TRL's signature, unchanged
    return [float(rl.rewards.last_number(c) == int(a)) for c, a in zip(completions, answer)]


algorithm = rl.grpo(clip=(0.2, 0.28))
optimizer = rl.make_optimizer(rl.Optimizer(learning_rate=1.5e-3))
for number, batch in enumerate(rl.cycle(tasks, 8, seed=0)):
    groups = rl.sample(policy, batch, group_size=8, sampling=rl.Sampling(max_tokens=32), key=number)
    groups = rl.score(groups, correct)
    metrics = rl.update(policy, optimizer, rl.make_batch(groups, algorithm), algorithm, max_grad_norm=1.0)
    print(rl.Step(number, metrics, groups))
    if number == 30:
        break
policy.save("runs/loop/adapters")  # mlx_lm.generate --model examples/arithmetic --adapter-path runs/loop/adapters
