"""A training run written with the library's own functions: run it from the root of the repository."""

import mlx.optimizers as optim

import mlxrl as rl

policy = rl.load("examples/arithmetic", lora=rl.LoRA(rank=8))
tasks = rl.tasks("examples/arithmetic/train.jsonl", prompt="question", answer="answer")


def correct(completions, answer, **_):  # TRL's signature, unchanged
    return [float(rl.rewards.last_number(c) == rl.rewards.last_number(a)) for c, a in zip(completions, answer)]


algo = rl.grpo(clip=(0.2, 0.28))
optimizer = optim.AdamW(learning_rate=1.5e-3, bias_correction=True)
for step, todo in enumerate(rl.cycle(tasks, 8, seed=0)):
    groups = rl.sample(policy, todo, group_size=8, sampling=rl.Sampling(max_tokens=32), key=step)
    groups = rl.score(groups, correct)
    metrics = rl.update(policy, optimizer, rl.pack(groups, algo), algo, max_grad_norm=1.0)
    print(rl.Step(step, metrics, groups))
    if step == 30:
        break
policy.save("runs/loop/adapters")  # mlx_lm.generate --model examples/arithmetic --adapter-path runs/loop/adapters
