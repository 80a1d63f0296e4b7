"""What a plan says against what the allocator has seen, and the command."""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3, qwen3_5, qwen3_moe

from helpers import CONFIG, EXAMPLE, JUDGE, MAZE, made
from mlxrl.algo.recipes import dr_grpo
from mlxrl.cli import main
from mlxrl.cli.plan import fitted, limited, plan_of
from mlxrl.config import read
from mlxrl.data import tasks
from mlxrl.policy.files import files_of
from mlxrl.policy.memory import Work, parts
from mlxrl.policy.policy import as_policy
from mlxrl.policy.shapes import Uncovered, model_of
from mlxrl.settings import LoRA
from mlxrl.train.pack import pack, widest
from mlxrl.train.step import update
from models import ready, tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 500, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (qwen3, {"model_type": "qwen3", **SIZES}),
    "qwen3_5": (qwen3_5, {"model_type": "qwen3_5", "text_config": {**SIZES, **LINEAR}}),
    "qwen3_moe": (qwen3_moe, {"model_type": "qwen3_moe", **SIZES, **EXPERTS}),
}


def a_model(kind: str) -> tuple[Any, Any]:
    module, settings = KINDS[kind]
    mx.random.seed(0)
    return ready(module.Model(module.ModelArgs.from_dict(settings))), model_of(settings)


def bytes_of(tree: Any) -> int:
    leaves: Any = tree_flatten(tree)
    return sum(leaf.nbytes for _, leaf in leaves)


def work(sized: Any, prompt: int, completion: int, group: int, budget: int, recompute: bool, rank: int = 4) -> Work:
    prefix, rows, tokens = widest(prompt, completion, group, 1, budget)
    return Work(
        size=4, weights=sized.weights(4), loading=0, rank=rank, keys=None, optimizer="adamw", rows=group, prompts=1,
        prompt=prompt, completion=completion, prefix=prefix, pass_rows=rows, pass_tokens=tokens,
        chunked=rows < group, units=1, learned=completion, recompute=recompute,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_adapters_are_counted_to_the_byte(kind):
    model, sized = a_model(kind)
    assert sized.weights(4) == bytes_of(model.parameters())
    subject = as_policy(model, tokenizer(), lora=LoRA(rank=4))
    part = parts(sized, work(sized, 10, 10, 4, 2048, False))[0]
    assert part.terms["adapters"] == bytes_of(subject.model.trainable_parameters())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("kind", "prompt", "budget"),
    [("qwen3", 150, 2048), ("qwen3", 150, 400), ("qwen3_5", 20, 2048), ("qwen3_moe", 20, 2048)],
)
def test_the_peak_of_an_update_is_foreseen(kind, prompt, budget, recompute):
    gc.collect()
    others = mx.get_active_memory()  # what tests before this one have left
    model, sized = a_model(kind)
    subject, algo, optimizer = as_policy(model, tokenizer(), lora=LoRA(rank=4)), dr_grpo(), optim.AdamW(1e-5)
    for _ in range(2):
        batch = pack([made([1.0, 0.0, 0.4, 0.2, 0.1], lengths=[108] * 5, prompt=prompt)], algo, tokens_per_pass=budget)
        mx.clear_cache()
        mx.reset_peak_memory()
        update(subject, optimizer, batch, algo, recompute=recompute)
    peak = parts(sized, work(sized, prompt, 108, 5, budget, recompute))[2].peak
    assert peak == pytest.approx(mx.get_peak_memory() - others, rel=0.2)


def test_a_pass_is_laid_out_as_it_is_packed():
    for prompt, length, budget in ((10, 64, 2048), (150, 64, 300), (150, 64, 2048), (20, 30, 100)):
        group = made([1.0, 0.0, 0.4, 0.2, 0.1], lengths=[length] * 5, prompt=prompt)
        found = pack([group], dr_grpo(), tokens_per_pass=budget)
        prefix, rows, tokens = widest(prompt, length, 5, 1, budget)
        assert {batch.prefix.size for batch in found} == {prefix}
        assert max(batch.tokens.shape[0] for batch in found) == rows
        assert {batch.tokens.shape[1] for batch in found} == {tokens}


def test_recomputation_and_smaller_passes_need_less_and_longer_rows_more():
    sized = a_model("qwen3")[1]

    def peak(completion: int = 64, budget: int = 2048, recompute: bool = False) -> int:
        return parts(sized, work(sized, 200, completion, 8, budget, recompute))[2].peak

    assert peak(recompute=True) < peak()
    assert peak(budget=330) < peak(budget=500) < peak() < peak(completion=128)


def test_packed_weights_are_counted_by_their_bits():
    """1,000 numbers of 4 bits and, for each 64 of them, a scale and a bias of 2 bytes: 500 + 1,000 / 64 x 4."""
    settings = KINDS["qwen3"][1]
    plain, packed = model_of(settings), model_of({**settings, "quantization": {"bits": 4, "group_size": 64}})
    numbers = plain.linear_parameters
    assert packed.weights(2) == numbers // 2 + 4 * numbers // 64 + 2 * plain.other_parameters


def test_headers_of_files_tell_the_weights():
    files = files_of(str(EXAMPLE), None)
    assert files.weights == files.model.weights(files.size)
    assert files_of(str(EXAMPLE), "float16").weights == files.weights // 2


@pytest.mark.parametrize(
    ("settings", "piece"),
    [
        ({"model_type": "gpt2"}, "models of type 'gpt2'; covered are llama, "),
        ({"model_type": "llama", "num_hidden_layers": 2}, "without 'num_attention_heads'"),
        ({**KINDS["qwen3"][1], "quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, "packed as 'mxfp4'"),
    ],
)
def test_what_is_not_covered_is_named(settings, piece):
    with pytest.raises(Uncovered, match=piece.replace("'", ".")):
        model_of(settings)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "judge.py").write_text(JUDGE.format(on_step="pass"))
    return tmp_path


def plan(*arguments: str) -> int:
    return main(["plan", "--config", "run.toml", *arguments])


def test_it_fits_and_says_in_what(folder, capsys):
    assert plan("--memory", "8") == 0
    out = capsys.readouterr().out
    assert "of 8.00 GB" in out.splitlines()[-1]
    assert out.splitlines()[-1].startswith("fits in ")
    assert "by the model's tokenizer" in out
    assert all(part in out for part in ("load", "rollout", "update", "weights", "adapters"))


def test_what_does_not_fit_is_named_with_what_would(folder, capsys):
    many = ["rollout.tasks_per_step=64", "rollout.max_tokens=200", "train.tokens_per_pass=2048"]
    assert plan(*many, "--memory", "0.02") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("does not fit, because ")
    assert "of 20.0 MB; these settings would: train.tokens_per_pass=" in last
    remedy = last.split("these settings would: ")[1].split("; or ")[0].split()
    assert plan(*many, "--memory", "0.02", *remedy) == 0


def test_nothing_fits_into_less_than_the_weights(folder, capsys):
    assert plan("--memory", "0.0001") == 1
    assert "no setting of the plan would: a smaller or packed model, or more memory" in capsys.readouterr().out


def test_fit_prints_what_can_be_put_on_the_command_line(folder, capsys):
    many = ["rollout.tasks_per_step=64", "rollout.max_tokens=200"]
    assert plan(*many, "--fit", "--memory", "0.02") == 0
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("train.", "rollout."))]
    assert [line.split("=")[0] for line in found] == ["train.tokens_per_pass", "train.recompute", "rollout.max_rows"]
    assert plan(*many, *found, "--memory", "0.02") == 0


def test_json_has_bytes_and_seconds(folder, capsys):
    (folder / "out/run").mkdir(parents=True)
    lines = [{"step": n, "seconds/rollout": 2.0 + n, "seconds/update": 1.0} for n in range(3)]
    (folder / "out/run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plan("--json", "--memory", "4") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["memory"] == 4_000_000_000
    assert found["peak"] == max(part["peak"] for part in found["parts"].values())
    assert found["parts"]["update"]["weights"] == files_of(str(EXAMPLE), None).weights
    assert found["seconds"] == {"rollout": 3.0, "update": 1.0}


@pytest.mark.parametrize(
    ("arguments", "piece"),
    [
        (["--memory", "none"], "wanted GB, a number above 0 and at most 1e6, got 'none'"),
        (["--memory", "1e300"], "wanted GB, a number above 0 and at most 1e6, got '1e300'"),
        (["memory.cache_limit=1e300"], "cache_limit: wanted at least 0 and at most 1000000"),
        (["memory.wired_limit=1e7"], "wired_limit: wanted more than 0 and at most 1000000"),
        (["train.tokens_per_pass=0"], "tokens_per_pass: wanted at least 1"),
        (["train.max_tokens_per_row=0"], "max_tokens_per_row: wanted at least 1"),
        (["memory.cache_limit=-1"], "cache_limit: wanted at least 0"),
        (["model.id=some/model"], "plan: not covered: some/model, which has no config.json on this machine yet"),
        (["lora.keys=[\"self_attn.x\"]"], "'self_attn.x' is not a linear layer of this model's blocks"),
    ],
)  # fmt: skip
def test_faults_are_one_line_and_exit_with_2(folder, capsys, arguments, piece):
    try:
        code = plan(*arguments)
    except SystemExit as exit:
        code = exit.code
    err = capsys.readouterr().err
    assert code == 2
    assert err.count("\n") == 1
    assert piece in err


def test_a_dry_run_shows_the_plan_and_what_was_chosen(folder, capsys):
    assert main(["train", "--config", "run.toml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "tokens_per_pass = 2048" in out
    assert "# memory: tokens_per_pass is at most 2,048, with which an update needs about " in out
    assert "# memory: fits in " in out
    assert main(["train", "--config", "run.toml", "--dry-run", "model.id=some/model"]) == 0
    assert (
        "# memory: tokens_per_pass is at most 2,048, as the plan does not cover some/model" in capsys.readouterr().out
    )


def test_a_run_takes_the_largest_pass_that_fits(folder, capsys, monkeypatch):
    settings = read("run.toml", ["rollout.tasks_per_step=64"])
    rows = tasks(settings.data.train, settings.data.prompt)
    least = min(
        part.peak
        for part in plan_of(settings, rows).with_(("train.tokens_per_pass", 512)).parts
        if part.name == "update"
    )
    monkeypatch.setattr("mlxrl.cli.fit.machine", lambda: (least, False))
    assert main(["train", "--config", "run.toml", "rollout.tasks_per_step=64", "steps=1"]) == 0
    assert "tokens_per_pass = 512" in (folder / "out/run/config.toml").read_text()
    assert "at most 512, with which an update needs about" in " ".join(capsys.readouterr().out.split())


def test_fitting_takes_a_smaller_pass_before_recomputation(folder):
    settings = read("run.toml", ["rollout.tasks_per_step=64", "rollout.max_tokens=100"])
    rows = tasks(settings.data.train, settings.data.prompt)
    whole = plan_of(settings, rows, memory=8)
    assert dict(fitted(whole)) == {
        "train.tokens_per_pass": 2048, "train.recompute": False, "rollout.max_rows": 32,
    }  # fmt: skip
    assert dict(fitted(plan_of(settings, rows, memory=0.02)))["train.tokens_per_pass"] < 2048


def test_the_buffers_that_are_kept_have_a_limit(folder):
    settings = read("run.toml", ["memory.cache_limit=0.5"])
    before = mx.set_cache_limit(10**9)
    try:
        with limited(settings):
            assert mx.set_cache_limit(500_000_000) == 500_000_000
        assert mx.set_cache_limit(before) == 10**9
    finally:
        mx.set_cache_limit(before)


def test_a_large_group_is_planned_as_fast_as_a_small_one():
    begun = time.monotonic()
    assert widest(20, 64, 10**6, 100, 2048) == (20, 31, 64)  # (2,048 - 20) / 64
    assert time.monotonic() - begun < 0.1


def test_rows_end_with_the_context(folder):
    context = files_of(str(EXAMPLE), None).model.context
    settings = read("run.toml", ["rollout.max_tokens=1000000"])
    rows = tasks(settings.data.train, settings.data.prompt)
    work = plan_of(settings, rows).work
    assert work.completion == work.learned == context - work.prompt


WORLD = [f"environment.factory={MAZE}:Maze", "environment.max_turns=3", "rollout.max_tokens=10"]


def test_what_an_environment_answers_is_bounded_or_said_not_to_be_counted(folder, capsys):
    """3 turns of 10 tokens are sampled; a row that is cut at 100 holds 100 at most, with the answers."""
    assert plan(*WORLD) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(", without what the environment answers")
    settings = read("run.toml", [*WORLD, "train.max_tokens_per_row=100"])
    rows = tasks(settings.data.train, settings.data.prompt)
    bounded, free = plan_of(settings, rows).work, plan_of(read("run.toml", WORLD), rows).work
    assert (bounded.completion, bounded.learned) == (30, 100 - bounded.prompt)
    assert (free.completion, free.learned) == (30, 30)


def test_a_row_is_cut_in_training_and_in_the_plan(folder):
    settings = read("run.toml", ["rollout.max_tokens=200", "train.max_tokens_per_row=60"])
    whole = read("run.toml", ["rollout.max_tokens=200"])
    rows = tasks(settings.data.train, settings.data.prompt)
    cut, uncut = (plan_of(given, rows).work for given in (settings, whole))
    assert (cut.completion, cut.learned) == (200, 60 - cut.prompt)
    assert uncut.learned == 200
