"""What a plan measures against what the allocator has seen, and the command."""

from __future__ import annotations

import gc
import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from families import FAMILIES, SIZES
from helpers import CONFIG, EXAMPLE, JUDGE, MAZE, made
from mlxrl.algo.recipes import dr_grpo, grpo, opd
from mlxrl.algo.terms import TeacherVocabulary
from mlxrl.cli.main import main
from mlxrl.cli.plan import PASS, RECOMPUTE, ROWS, Plan, fitted
from mlxrl.config import read
from mlxrl.errors import UserError
from mlxrl.policy.policy import as_policy, built, load
from mlxrl.policy.skeleton import Skeleton, skeleton
from mlxrl.rollout.prefill import context_of
from mlxrl.rollout.sample import sample
from mlxrl.runs.experiment import Experiment
from mlxrl.settings import LoRA, Optimizer, Sampling, Train
from mlxrl.train import memory_plan
from mlxrl.train.batch import make_batch
from mlxrl.train.memory_plan import Work, constant, extrapolated, passes, rollout
from mlxrl.train.optimizer import make_optimizer
from mlxrl.train.update import update
from mlxrl.types import Task
from models import tokenizer

HYBRID = {**FAMILIES["qwen3_5"]["text_config"], "full_attention_interval": 4}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3_moe": FAMILIES["qwen3_moe"], "qwen3_5": {"text_config": HYBRID},
    "deepseek_v3": FAMILIES["deepseek_v3"], "gemma4_text": FAMILIES["gemma4_text"],
}  # fmt: skip


def skeleton_of(kind: str, layers: int, bits: int | None = None) -> Skeleton:
    """A tiny random model of so many layers, packed where bits are given."""
    found = {"model_type": kind, **SIZES, **KINDS[kind]}
    if "text_config" in found:
        found["text_config"] = {**found["text_config"], "num_hidden_layers": layers}
    found["num_hidden_layers"] = layers
    if "layer_types" in found:
        found["layer_types"] = (found["layer_types"] * layers)[:layers]
    mx.random.seed(0)
    model = built(found)
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    return Skeleton(kind, found, model, tokenizer())


def bytes_of(tree: Any) -> int:
    leaves: Any = tree_flatten(tree)
    return sum(leaf.nbytes for _, leaf in leaves)


def work(**changes: Any) -> Work:
    usual = {"tasks": 1, "group": 5, "rows": 5, "prompt": 60, "tokens": 40, "sampled": 40, "trained": 40, "answer": 0}
    return Work(**{**usual, "budget": 2048, "recompute": False, **changes})


def optimizer() -> Any:
    return make_optimizer(Optimizer())


def an_update(kind: str, layers: int, at: Work, algorithm: Any, bits: int | None = None) -> dict[str, float]:
    return passes(skeleton_of(kind, layers, bits), LoRA(rank=4), at, algorithm, optimizer)


def a_rollout(kind: str, layers: int, at: Work) -> dict[str, float]:
    return rollout(skeleton_of(kind, layers), LoRA(rank=4), at, Sampling(), grpo())


def policy_of(kind: str, layers: int, bits: int | None = None) -> Any:
    return as_policy(skeleton_of(kind, layers, bits).model, tokenizer(), lora=LoRA(rank=4))


def test_a_skeleton_is_not_in_memory_and_its_weights_are_counted():
    gc.collect()
    before = mx.get_active_memory()
    found = skeleton(str(EXAMPLE))
    assert mx.get_active_memory() - before < 10_000  # keys of random numbers
    weights = constant(found)["weights"]
    assert weights == bytes_of(load(str(EXAMPLE), lora=None).model.parameters())
    half = skeleton(str(EXAMPLE), "float16")
    assert constant(half)["weights"] == weights // 2
    assert half.loading > weights  # the file's header too


@pytest.mark.parametrize(("kind", "bits"), [("llama", None), ("llama", 4), ("qwen3_5", None), ("qwen3_moe", None)])
def test_what_is_exact_is_counted_to_the_byte(kind, bits):
    found, rule = constant(skeleton_of(kind, 12, bits), LoRA(rank=4), optimizer()), optimizer()
    subject = policy_of(kind, 12, bits)
    trained = subject.model.trainable_parameters()
    rule.init(trained)
    assert found["adapters"] == bytes_of(trained)
    assert found["weights"] == bytes_of(subject.model.parameters()) - found["adapters"]
    assert found["optimizer"] == bytes_of(rule.state)


@pytest.mark.parametrize(
    ("kind", "layers", "counts"),
    [
        ("llama", 6, [(6, 1.0)]),  # all
        ("llama", 12, [(2, -1.5), (6, 2.5)]),  # 2 + (12 - 2) / (6 - 2) x 4
        ("qwen3_5", 24, [(4, -4.0), (8, 5.0)]),  # three recurrent ones and one of attention, and as many more
        ("deepseek_v3", 12, [(2, -1.5), (6, 2.5)]),  # the first is dense
        ("gemma4_text", 12, [(12, 1.0)]),  # its last ones use the caches of others
    ],
)
def test_the_first_layers_stand_for_all(kind, layers, counts):
    assert skeleton_of(kind, layers).counts == counts


def test_a_model_with_some_layers_has_their_types_bits_and_so_many_words():
    small: Any = skeleton_of("qwen3_moe", 12, bits=4).first_layers(2, 100)
    assert len(small.layers) == 2
    assert small.model.embed_tokens.weight.shape == (100, 8)  # 64 numbers of 4 bits
    assert type(small.layers[1].mlp.switch_mlp.up_proj).__name__ == "QuantizedSwitchLinear"
    assert mx.isfinite(small(mx.array([[1, 2, 99]]))).all()


@pytest.mark.parametrize(
    ("kind", "bits", "changes"),
    [
        ("llama", None, {}),
        pytest.param("llama", None, {"recompute": True}, marks=pytest.mark.slow),
        pytest.param("llama", None, {"prompt": 150, "budget": 250}, marks=pytest.mark.slow),
        pytest.param("llama", 4, {}, marks=pytest.mark.slow),
        ("qwen3_5", None, {}),
        ("qwen3_moe", None, {"tasks": 3, "group": 4}),
    ],
)
def test_the_peak_of_an_update_is_foreseen(kind, bits, changes):
    """8 of 12 layers are measured. The tolerance is for what else the machine does: MLX runs ahead of it."""
    at, rule = work(**changes), optimizer()
    always = constant(skeleton_of(kind, 12, bits), LoRA(rank=4), optimizer())
    needed = sum(always.values()) + max(an_update(kind, 12, at, dr_grpo(), bits).values())
    gc.collect()
    others = mx.get_active_memory()  # what tests before this one have left
    subject = policy_of(kind, 12, bits)
    rewards = [float(number % 2) for number in range(at.group)]
    groups = [made(rewards, lengths=[40] * at.group, prompt=at.prompt, seed=seed) for seed in range(at.tasks)]
    for _ in range(2):
        batch = make_batch(groups, dr_grpo(), Train(tokens_per_pass=at.budget))
        mx.clear_cache()
        mx.reset_peak_memory()
        update(subject, rule, batch, dr_grpo(), recompute=at.recompute)
    assert needed == pytest.approx(mx.get_peak_memory() - others, rel=0.25)


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_5", "qwen3_moe"))]
)
def test_the_peak_of_a_rollout_is_foreseen(kind):
    phases = a_rollout(kind, 12, work(tasks=2, group=8, rows=16, prompt=60, tokens=40))
    always = constant(skeleton_of(kind, 12), LoRA(rank=4), optimizer())
    gc.collect()
    others = mx.get_active_memory()
    subject = policy_of(kind, 12)
    tasks = [Task("a" * 56), Task("b" * 56)]  # 60 tokens with the template's
    mx.clear_cache()
    mx.reset_peak_memory()
    groups = sample(subject, tasks, group_size=8, sampling=Sampling(max_tokens=40, min_tokens=40))
    assert len(groups[0][0].prompt) == 60
    needed = always["weights"] + always["adapters"] + max(phases.values())
    assert needed == pytest.approx(mx.get_peak_memory() - others, rel=0.25)
    assert set(phases) == {"first prompts", "decoding", "answers", "later prompts"}


def test_answers_and_sequences_that_wait_need_more():
    once, waiting, answered = (
        a_rollout("llama", 4, work(tasks=4, group=4, **changes))
        for changes in ({"rows": 16}, {"rows": 8}, {"rows": 8, "answer": 40})
    )
    assert once["later prompts"] == 0 < waiting["later prompts"]
    assert answered["answers"] > waiting["decoding"] > waiting["answers"]


def test_what_is_measured_does_not_grow_with_the_model(monkeypatch):
    """Two models of 2 and 6 layers are, whatever 40 layers, and so few sequences of 1,000 tokens that they are fast."""
    seen: list[tuple[int, int]] = []

    def counted(subject, batch, *_, **__):
        seen.append((len(subject.model.layers), max(one.prefix.size + one.tokens.size for one in batch)))
        return {}, None

    monkeypatch.setattr(memory_plan, "gradient", counted)
    an_update("llama", 40, work(group=8, rows=8, prompt=200, tokens=1000, trained=1000), grpo())
    assert {layers for layers, _ in seen} == {2, 6}
    assert len(seen) == 2 * 2 * 1  # of a sequence of each pass, a half and the whole of what is measured
    assert max(tokens for _, tokens in seen) < 600


def test_extrapolation_is_exact_where_it_should_be():
    """5 + 3 sequences, of which few are measured; tokens and their square; more tokens than a prefix has."""
    seen: list[tuple[int, float]] = []

    def rows(count, share):
        seen.append((count, share))
        return 5 + 3 * count

    assert extrapolated(rows, 100, 100) == 305
    assert seen == [(2, 1.0), (5, 1.0)]  # of 512 tokens
    assert extrapolated(rows, 3, 100) == 14
    assert extrapolated(lambda count, share: count * (7 * share + 11 * share**2), 2, 2048, curved=True) == 36
    assert extrapolated(lambda count, share: 4 + 2 * share, 1, 2048) == 6
    seen.clear()
    extrapolated(rows, 100, 10, 300)
    assert seen == [(30, 1.0), (60, 1.0)]


def test_a_teachers_distribution_is_measured_too():
    plain = an_update("llama", 4, work(), grpo())["passes"]
    assert an_update("llama", 4, work(), opd(teacher=TeacherVocabulary()))["passes"] > plain
    assert passes(skeleton_of("llama", 4), None, work(), grpo())["passes"] < plain  # without a gradient


def test_a_model_whose_code_fails_is_one_line(monkeypatch):
    monkeypatch.setattr(memory_plan, "gradient", lambda *_, **__: 1 / 0)
    with pytest.raises(UserError, match="llama: ZeroDivisionError: division by zero"):
        an_update("llama", 4, work(), grpo())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "judge.py").write_text(JUDGE.format(on_step="pass"))
    return tmp_path


def plan(*arguments: str) -> int:
    return main(["plan", "--config", "run.toml", *arguments])


def planned(*overrides: str, memory: float | None = None) -> Plan:
    return Plan.of(Experiment.of(*read("run.toml", list(overrides))), memory)


def step(plan: Plan) -> Work:
    return plan.work(plan.config)


def settings(plan: Plan) -> dict[str, Any]:
    return plan.chosen(PASS, RECOMPUTE, ROWS)


def test_it_fits_and_says_in_what(folder, capsys):
    assert plan("--memory", "8") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("fits in ")
    assert out.splitlines()[-1].endswith(" of 8.00 GB")
    assert all(part in out for part in ("load", "rollout", "update", "weights", "adapters", "passes"))


MANY = ["rollout.tasks_per_step=64", "sampling.max_tokens=200"]


@pytest.mark.slow
def test_what_does_not_fit_is_named_with_what_would(folder, capsys):
    assert plan(*MANY, "train.tokens_per_pass=2048", "--memory", "0.03") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("does not fit, because update needs ")
    assert " of 30 MB; these settings would: train.tokens_per_pass=" in last
    found = last.split("these settings would: ")[1].split()
    assert len({one.split("=")[0] for one in found}) == len(found)
    assert plan(*MANY, "train.tokens_per_pass=2048", "--memory", "0.03", *found) == 0


@pytest.mark.slow
def test_nothing_fits_into_less_than_the_weights(folder, capsys):
    assert plan("--memory", "0.0001") == 1
    assert "no setting would: a smaller or packed model, or more memory" in capsys.readouterr().out
    assert plan("--memory", "0.0008") == 1  # nor is more than the weights enough
    assert "no setting would" in capsys.readouterr().out


@pytest.mark.slow
def test_fit_prints_what_can_be_put_on_the_command_line(folder, capsys):
    assert plan(*MANY, "--fit", "--memory", "0.03") == 0
    out = capsys.readouterr().out.splitlines()
    found = [line for line in out if line.startswith(("train.", "rollout."))]
    assert [line.split("=")[0] for line in found] == [PASS, RECOMPUTE, ROWS]
    assert plan(*MANY, *found, "--memory", "0.03") == 0


def test_json_has_bytes_and_seconds(folder, capsys):
    (folder / "out/run").mkdir(parents=True)
    lines = [{"step": n, "seconds/rollout": 2.0 + n, "seconds/update": 1.0} for n in range(3)]
    (folder / "out/run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plan("--json", "--memory", "4") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["memory"] == 4_000_000_000
    assert found["peak"] == max(part["peak"] for part in found["parts"].values())
    assert found["parts"]["update"]["weights"] == constant(skeleton(str(EXAMPLE)))["weights"]
    assert found["settings"] == {PASS: 2048, RECOMPUTE: False, ROWS: 32}
    assert found["remedy"] == []
    assert found["seconds"] == {"rollout": 3.0, "update": 1.0}


def test_prompts_that_fill_a_context_are_no_part_of_the_plan(folder):
    world = "class World:\n    def __init__(self, least=2): self.least = least\n    def reset(self, task):\n"
    world += "        return '1+' * (300 if int(task.columns['answer']) > self.least else 20)\n"
    world += "    def step(self, reply): ...\n"
    (folder / "world.py").write_text(world)
    hints = ["1+" * 300 if number == 3 else "so" for number in range(5)]
    rows = [{"question": "?", "answer": str(number), "hint": hint} for number, hint in enumerate(hints)]
    (folder / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = ["data.train=few.jsonl", "environment.factory=world.py:World"]
    found = planned(*few)
    assert step(found).prompt == 43  # 40 and the template's three
    line = "environment: reset: a prompt of 603 tokens does not fit the context of 512"
    assert found.left_out == f"{line}; 2 of the first 5 are left out"
    with pytest.raises(UserError, match=f"{line}: nor does any other of 5"):
        planned(*few, "environment.arguments.least=-1")
    found = planned(few[0], "algorithm.name=opd", "teacher.hint=hint")
    assert "line 4: the teacher's prompt, with 'hint', of " in found.left_out
    assert found.left_out.endswith("; 1 of 5 are left out")


@pytest.mark.parametrize(
    ("arguments", "piece"),
    [
        (["--memory", "none"], "wanted GB, a number above 0 and at most 1e6, got 'none'"),
        (["--memory", "1e300"], "wanted GB, a number above 0 and at most 1e6, got '1e300'"),
        (["memory.cache_limit=1e300"], "cache_limit: wanted at least 0 and at most 1000000"),
        (["memory.wired_limit=1e7"], "wired_limit: wanted more than 0 and at most 1000000"),
        (["train.tokens_per_pass=0"], "tokens_per_pass: wanted a whole number of at least 1"),
        (["train.max_tokens_per_sequence=0"], "max_tokens_per_sequence: wanted a whole number of at least 1"),
        (["memory.cache_limit=-1"], "cache_limit: wanted at least 0"),
        (["model.id=some/model"], "mlxrl: model: id: some/model is not on this machine yet"),
        (["lora.keys=[\"self_attn.x\"]"], "lora: keys: 'self_attn.x' matches no layer"),
        (["environment.factory=judge.py:broken"], "environment: reset: KeyError: 'lost'"),
    ],
)  # fmt: skip
def test_faults_are_one_line_and_exit_with_2(folder, capsys, arguments, piece):
    lost = "class broken:\n    def reset(self, task):\n        raise KeyError('lost')\n    def step(self, reply): ...\n"
    (folder / "judge.py").write_text(JUDGE.format(on_step="pass") + lost)
    try:
        code = plan(*arguments)
    except SystemExit as exit:
        code = exit.code
    err = capsys.readouterr().err
    assert code == 2
    assert err.count("\n") == 1
    assert piece in err


def test_a_model_that_was_fetched_is_found_in_the_cache(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda id, **_: str(EXAMPLE))
    assert constant(skeleton("some/model")) == constant(skeleton(str(EXAMPLE)))


def test_a_dry_run_shows_the_plan_and_what_was_chosen(folder, capsys):
    assert main(["train", "--config", "run.toml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "tokens_per_pass = 2048" in out
    assert "# memory: tokens_per_pass is at most 2,048, with which an update needs about " in out
    assert "# memory: fits in " in out
    assert main(["train", "--config", "run.toml", "--dry-run", "model.id=some/model"]) == 0
    out = capsys.readouterr().out
    why = "no plan is possible: model: id: some/model is not on this machine yet"
    assert f"# memory: tokens_per_pass is at most 2,048, as {why}" in out
    assert f"# memory: {why}" in out


@pytest.mark.slow
def test_a_run_takes_the_largest_pass_that_fits_says_so_and_writes_it_down(folder, capsys):
    found = planned("rollout.tasks_per_step=64").with_({PASS: 512}).peak("update") / 1e9 * 1.2  # 1,024 need twice that
    assert main(["train", "--config", "run.toml", "rollout.tasks_per_step=64", "steps=1", "--memory", f"{found}"]) == 0
    assert "tokens_per_pass = 512" in (folder / "out/run/config.toml").read_text()
    assert "at most 512, with which an update needs about " in " ".join(capsys.readouterr().out.split())


def test_a_size_of_a_pass_that_is_given_is_measured_and_kept(folder, capsys):
    assert plan("train.tokens_per_pass=4096", "--json", "--memory", "4") == 0
    assert json.loads(capsys.readouterr().out)["settings"][PASS] == 4096
    assert main(["train", "--config", "run.toml", "steps=1", "train.tokens_per_pass=4096"]) == 0
    assert "tokens_per_pass = 4096" in (folder / "out/run/config.toml").read_text()
    assert "a pass" not in capsys.readouterr().out


@pytest.mark.slow
def test_fitting_takes_a_smaller_pass_before_recomputation(folder):
    whole = planned("rollout.tasks_per_step=64", "sampling.max_tokens=100", memory=8)
    assert settings(fitted(whole)) == {PASS: 2048, RECOMPUTE: False, ROWS: 32}
    less = settings(fitted(planned("rollout.tasks_per_step=64", "sampling.max_tokens=100", memory=0.03)))
    assert less[PASS] < 2048
    assert less[RECOMPUTE] is False


def test_a_pass_is_laid_out_as_batches_are():
    for prompt, length, budget in ((10, 64, 2048), (150, 64, 300), (150, 64, 2048), (20, 30, 100)):
        group = made([1.0, 0.0, 0.4, 0.2, 0.1], lengths=[length] * 5, prompt=prompt)
        found = make_batch([group], dr_grpo(), Train(tokens_per_pass=budget))
        prefix, rows, tokens = work(prompt=prompt, trained=length, budget=budget).widest()
        assert {batch.prefix.size for batch in found} == {prefix}
        assert max(batch.tokens.shape[0] for batch in found) == rows
        assert {batch.tokens.shape[1] for batch in found} == {tokens}
    large = work(prompt=20, trained=64, group=10**6, tasks=100)
    assert large.widest() == (20, 31, 64)  # (2,048 - 20) / 64


def test_sequences_end_with_the_context(folder):
    found = planned("sampling.max_tokens=1000000")
    assert step(found).tokens == step(found).trained == context_of(skeleton(str(EXAMPLE)).model) - step(found).prompt


WORLD = [f"environment.factory={MAZE}:Maze", "environment.max_turns=3", "sampling.max_tokens=10"]


def test_a_sequence_is_as_long_as_all_turns_may_be(folder, capsys):
    """3 turns of 10 tokens, and 2 answers that are taken to have as many; one that is cut at 45 has 45 with them."""
    maze = str(EXAMPLE.parent / "maze")
    data = [f"data.{name}={maze}/{file}.jsonl" for name, file in (("train", "train"), ("evaluation", "test"))]
    data += ["data.prompt=prompt", f"model.id={maze}", "reward.functions=[]"]
    found = step(planned(*WORLD, *data))
    assert (found.tokens, found.sampled, found.trained, found.answer) == (50, 30, 50, 10)
    cut = step(planned(*WORLD, *data, "train.max_tokens_per_sequence=45"))
    assert (cut.tokens, cut.trained) == (50, 45 - cut.prompt)
    some = step(planned(*WORLD, *data, "environment.max_episode_tokens=25"))
    assert (some.tokens, some.sampled) == (45, 25)
    assert plan(*WORLD, *data) == 0
    assert "an environment's answer is taken to have 10 tokens, as many as a turn may have" in capsys.readouterr().out


def test_a_sequence_is_cut_in_training_and_in_the_plan(folder):
    cut, uncut = (
        step(planned("sampling.max_tokens=200", *more)) for more in (["train.max_tokens_per_sequence=60"], [])
    )
    assert (cut.tokens, cut.trained) == (200, 60 - cut.prompt)
    assert uncut.trained == 200


def test_a_teacher_has_weights(folder):
    text = CONFIG.replace(f'evaluation = "{EXAMPLE}/test.jsonl"\n', "").replace("examples = 8", "")
    (folder / "run.toml").write_text(text)
    learned = ["algorithm.name=opd", "reward.functions=[]"]
    other, hinted = (planned(*learned, one) for one in (f"teacher.id={EXAMPLE}", "teacher.hint=answer"))
    assert other.need("update")["teacher"] == other.need("update")["weights"]
    assert "teacher" not in hinted.need("update")
