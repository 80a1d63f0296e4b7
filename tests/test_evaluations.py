"""The evaluations of a run: what is evaluated with which weights, what is recorded, and what follows from it."""

import json
import shutil
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

from helpers import CONFIG, EXAMPLE
from mlxrl.cli import main
from mlxrl.files import read_lines
from mlxrl.runs.evaluations import Evaluations
from mlxrl.runs.folder import RunFolder
from mlxrl.train.step import Steps

SCORES = """
def judge(prompts, completions, trainer_state, **_):
    if len(set(prompts)) == 2:  # a step of 2 tasks, not an evaluation of 8 examples
        return {steps}
    value = {values}.get(trainer_state.global_step)
    return [float(sum(map(ord, text)) % 2) if value is None else value for text in completions]
"""
VARIED, EQUAL = "[float(sum(map(ord, text)) % 3) for text in completions]", "[0.5] * len(completions)"
CONFIG = CONFIG.replace("[rollout]", "temperature = 3.0\n[train]\ntokens_per_pass = 512\n[rollout]").replace(
    "learning_rate = 1e-3", "learning_rate = 3e-2"
)
VALIDATED = CONFIG.replace("evaluation = ", 'validation = "chosen.jsonl"\nevaluation = ').replace(
    "checkpoint_every = 1", "checkpoint_every = 0\nevaluate_every = 1"
)
"""A run that is evaluated after each step, also on further examples."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = (EXAMPLE / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "chosen.jsonl").write_text("".join(lines[-8:]))
    return tmp_path


def train(folder, *arguments, values=None, steps=VARIED, config=CONFIG):
    """Train with rewards of steps, and of evaluations by the number of steps taken, where they are not the text's."""
    (folder / "run.toml").write_text(config)
    (folder / "judge.py").write_text(SCORES.format(values=values or {}, steps=steps))
    return main(["train", "--config", "run.toml", *arguments])


def report(folder):
    return json.loads((folder / "out/run/evaluation.json").read_text())


def events(folder, *kinds):
    return [event for event in read_lines(folder / "out/run/events.jsonl") if event["event"] in kinds]


def weights(folder, name="adapters"):
    return mx.load(str(folder / "out/run" / name / "adapters.safetensors"))


def same(one, other):
    return one.keys() == other.keys() and all(mx.array_equal(one[name], other[name]) for name in one)


def test_evaluation_json_says_what_was_evaluated_and_what_came_out(folder):
    assert train(folder, "evaluation.samples=3", "run.evaluate_every=1") == 0
    found = report(folder)
    assert (found["state"], found["before"]["step"], found["after"]["step"]) == ("done", 0, 2)
    assert found["examples"]["examples"] == 8
    assert found["settings"]["evaluation"] == {
        "examples": 8, "temperature": 0.0, "success": 1.0, "samples": 3, "samples_temperature": 1.0,
    }  # fmt: skip
    for name in ("before", "after"):
        scores = found["scores"][name]
        assert [len(scores["rewards"]), len(scores["samples"]), len(scores["samples"][0])] == [8, 8, 3]
        assert sum(scores["rewards"]) / 8 == pytest.approx(found[name]["mean_reward"])
        assert sum(r == 1 for one in scores["samples"] for r in one) / 24 <= found[name]["pass@1"]
        assert 0 <= found[name]["pass@1"] <= found[name]["pass@2"] <= found[name]["pass@3"] <= 1
    assert found["before"]["mean_reward"] != found["after"]["mean_reward"]
    assert 0 <= found["mcnemar_p"] <= 1
    counts = [found[name] for name in ("improved", "worsened", "equal")]
    pairs = list(zip(found["scores"]["before"]["rewards"], found["scores"]["after"]["rewards"], strict=True))
    assert counts == [sum(a < b for a, b in pairs), sum(a > b for a, b in pairs), sum(a == b for a, b in pairs)]
    assert [(one["when"], one["step"]) for one in events(folder, "evaluation")] == [
        ("before training", 0), ("after step 1", 1), ("after training", 2),
    ]  # fmt: skip
    first, second = (one["adapter/distance"] for one in read_lines(folder / "out/run/metrics.jsonl"))
    assert 0 < first < second
    assert not events(folder, "unmoved")


def test_what_is_evaluated_at_the_end_is_what_adapters_holds(folder, monkeypatch):
    """The weights are spoilt between the saving and the evaluation: it is of those that were saved."""
    real, compared = Evaluations.save, []

    def spoiling(self, target):
        real(self, target)
        weights = self.policy.model.trainable_parameters()
        self.policy.model.update(tree_map(mx.ones_like, weights))

    def evaluated(self):
        after(self)
        compared.append(same(dict(tree_flatten(self.policy.model.trainable_parameters())), weights(folder)))

    after = Evaluations.after
    monkeypatch.setattr(Evaluations, "save", spoiling)
    monkeypatch.setattr(Evaluations, "after", evaluated)
    assert train(folder, "steps=1") == 0
    assert compared == [True]


def test_eval_reproduces_a_run_and_says_where_it_does_not(folder, capsys):
    assert train(folder, "evaluation.samples=2") == 0
    found = report(folder)
    capsys.readouterr()

    def evaluated(*arguments):
        code = main(["eval", "--run", "out/run", *arguments])
        return code, capsys.readouterr().out.splitlines()

    numbers = "accuracy {accuracy:.4f}, mean reward {mean_reward:.4f}, pass@1 {pass@1:.4f}, pass@2 {pass@2:.4f}"
    after = f"out/run/adapters: {numbers.format(**found['after'])}, 8 examples"
    before = f"without adapter: {numbers.format(**found['before'])}, 8 examples"
    equal = "equal to what the run recorded {} training: 8 rewards and 2 samples of each"
    assert evaluated() == (0, [after, equal.format("after")])
    assert evaluated("--base") == (0, [before, equal.format("before")])
    assert evaluated("--adapter", "out/run/adapters") == (0, [after])
    code, lines = evaluated("evaluation.examples=4")
    assert (code, lines[1:]) == (1, ["not what the run recorded after training: the examples are others"])
    changed = {**weights(folder)}
    changed = {name: mx.ones_like(array) for name, array in changed.items()}
    mx.save_safetensors(str(folder / "out/run/adapters/adapters.safetensors"), changed)
    code, (_, line) = evaluated()
    assert code == 1
    assert line.startswith("not what the run recorded after training: ")
    assert line.endswith("adapters/adapters.safetensors is another file")


def test_eval_of_a_run_that_recorded_nothing_says_so(folder, capsys):
    config = VALIDATED.replace(f'evaluation = "{EXAMPLE}/test.jsonl"\n', "")
    assert train(folder, "steps=1", config=config) == 0
    capsys.readouterr()
    given = f"data.evaluation={EXAMPLE}/test.jsonl"
    assert main(["eval", "--run", "out/run", given]) == 0
    line = "the run recorded no evaluation after training: data.evaluation is left out"
    assert capsys.readouterr().out.splitlines()[1] == line


def test_the_best_adapter_is_the_result_and_what_is_evaluated(folder, capsys):
    """On validation the rewards are 0.25 before, then 0.5, 0.75 and 0.5: the best is that after step 2."""
    values = {0: 0.25, 1: 0.5, 2: 0.75, 3: 0.5}
    assert train(folder, "steps=3", "run.keep=best", "run.checkpoint_every=1", values=values, config=VALIDATED) == 0
    found = report(folder)
    assert found["validation"] == {"best_step": 2, "mean_reward": 0.75, "evaluations_since": 1}
    assert (found["after"]["step"], found["after"]["mean_reward"]) == (2, 0.75)
    assert same(weights(folder), weights(folder, "best/step-000002"))
    assert same(weights(folder), weights(folder, "checkpoints/step-000002"))
    assert not same(weights(folder), weights(folder, "checkpoints/step-000003"))
    assert "best      after step 2: mean reward 0.750 on data.validation" in capsys.readouterr().out


def test_a_run_ends_early_where_validation_does_not_improve(folder, capsys):
    values = {0: 0.5, 1: 0.75, 2: 0.5, 3: 0.5, 4: 1.0}
    assert train(folder, "steps=9", "run.patience=2", values=values, config=VALIDATED) == 0
    assert [line["step"] for line in read_lines(folder / "out/run/metrics.jsonl")] == [1, 2, 3]
    assert [(one["step"], one["best_step"]) for one in events(folder, "stopped early")] == [(3, 1)]
    assert report(folder)["after"]["step"] == 3
    assert "ended     no improvement on data.validation in 2 evaluations" in capsys.readouterr().out
    assert json.loads((folder / "out/run/manifest.json").read_text())["state"] == "succeeded"


def test_a_rejected_adapter_is_taken_back_with_its_optimizer(folder):
    """After step 2 validation falls from 0.75 to 0, after step 3 it is 0.75 again."""
    values = {0: 0.5, 1: 0.75, 2: 0.0, 3: 0.75}
    seen = []
    take_back = Steps.take_back

    def watched(self, *arguments, **values):
        take_back(self, *arguments, **values)
        policy, state = self._policy, self.state
        leaves = dict(tree_flatten(policy.model.trainable_parameters()))
        seen.append((leaves, dict(tree_flatten(state.optimizer.state)), state.step))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steps, "take_back", watched)
        options = ["steps=3", "run.accept_margin=0.1", "run.checkpoint_every=1", "run.checkpoints=9"]
        assert train(folder, *options, values=values, config=VALIDATED) == 0
    ((leaves, optimizer, step),) = seen
    accepted = folder / "out/run/accepted/step-000001"
    assert step == 2  # data and keys go on
    assert same(leaves, mx.load(str(accepted / "adapters.safetensors")))
    assert same(optimizer, mx.load(str(accepted / "optimizer.safetensors")))
    decisions = [(one["step"], one.get("decision")) for one in events(folder, "validation")]
    assert decisions == [(0, None), (1, "accepted"), (2, "rejected"), (3, "accepted")]
    assert same(weights(folder, "checkpoints/step-000002"), weights(folder, "checkpoints/step-000001"))
    assert not same(weights(folder), weights(folder, "checkpoints/step-000001"))


def test_a_run_that_moves_no_weight_says_so_and_one_without_held_out_examples_why(folder, capsys):
    config = CONFIG.replace(f'evaluation = "{EXAMPLE}/test.jsonl"\n', "").replace("[evaluation]\nexamples = 8\n", "")
    assert train(folder, steps=EQUAL, config=config) == 0
    assert report(folder) == {"state": "not_run", "reason": "data.evaluation is left out"}
    line = "unmoved   2 steps changed no weight: the adapter is what it was at the start"
    assert line in capsys.readouterr().out
    assert [one["step"] for one in events(folder, "unmoved")] == [2]
    assert [one["adapter/distance"] for one in read_lines(folder / "out/run/metrics.jsonl")] == [0.0, 0.0]


def test_a_run_that_is_resumed_selects_as_one_that_was_not(folder):
    """Step 2, where the first part ends, is rejected. What was evaluated before is not evaluated anew."""
    values = {0: 0.5, 1: 0.75, 2: 0.0, 3: 0.75}
    options = ["run.accept_margin=0.1", "run.keep=best"]
    assert train(folder, "steps=3", "run.folder=out/whole", *options, values=values, config=VALIDATED) == 0
    assert train(folder, "steps=2", *options, values=values, config=VALIDATED) == 0
    assert main(["train", "--resume", "out/run", "steps=3"]) == 0
    whole, resumed = (folder / "out" / name for name in ("whole", "run"))
    for name in ("adapters", "accepted/step-000003", "best/step-000001"):
        assert same(*(mx.load(str(run / name / "adapters.safetensors")) for run in (whole, resumed)))
    first, second = (json.loads((run / "evaluation.json").read_text()) for run in (whole, resumed))
    assert first == second
    values = [
        json.loads((run / "checkpoints/step-000003/state.json").read_text())["values"] for run in (whole, resumed)
    ]
    assert values[0] == values[1]
    whens = [one["when"] for one in events(folder, "evaluation", "validation")]
    assert whens.count("before training") == 2


def test_an_evaluation_that_was_cut_off_after_validation_is_made_up_for(folder, monkeypatch):
    values = {0: 0.5, 1: 0.75, 2: 0.8}
    options = ["steps=2", "run.accept_margin=0.1", "run.keep=best"]
    assert train(folder, "run.folder=out/whole", *options, values=values, config=VALIDATED) == 0
    own = Evaluations._held_out

    def cut_off(self, step, when):
        if step == 1:
            raise KeyboardInterrupt
        return own(self, step, when)

    monkeypatch.setattr(Evaluations, "_held_out", cut_off)
    assert train(folder, *options, values=values, config=VALIDATED) == 130
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert main(["train", "--resume", "out/run"]) == 0
    whole, resumed = (
        [{name: value for name, value in line.items() if name.startswith(("step", "evaluation", "validation"))}
         for line in read_lines(folder / "out" / run / "metrics.jsonl")]
        for run in ("whole", "run")
    )  # fmt: skip
    assert whole == resumed
    assert "evaluation/accuracy" in resumed[0]


def test_an_evaluation_under_other_settings_begins_with_the_start_again(folder):
    """The weights are those of step 1 when the run goes on; what it began with is evaluated all the same."""
    assert train(folder, "steps=1", steps=VARIED) == 0
    before = report(folder)["before"]
    assert main(["train", "--resume", "out/run", "steps=2", "sampling.min_tokens=2"]) == 0
    found = report(folder)
    assert found["settings"]["sampling"]["min_tokens"] == 2
    assert found["before"] == before  # no completion of the start has fewer tokens
    assert [one["when"] for one in events(folder, "evaluation")].count("before training") == 2


def test_what_a_checkpoint_refers_to_is_not_removed(folder):
    """At step 7, with checkpoints of steps 4 and 6: these refer to 3 and 5. Step 8 is taken again."""
    run = RunFolder(folder)
    for name, steps in {"checkpoints": (4, 6), "best": (1, 3, 5, 8)}.items():
        for step in steps:
            (folder / name / f"step-{step:06d}").mkdir(parents=True)
    steps = SimpleNamespace(state=SimpleNamespace(step=7))
    Evaluations(None, run, None, steps, (), None)._clear(run.best)
    assert sorted(path.name for path in run.best.iterdir()) == ["step-000003", "step-000005"]
    shutil.rmtree(run.checkpoints)
    Evaluations(None, run, None, steps, (), None)._clear(run.best)
    assert [path.name for path in run.best.iterdir()] == ["step-000005"]


@pytest.mark.slow
def test_a_choice_that_begins_when_a_run_is_resumed_begins_with_what_is_there(folder):
    values = {0: 0.5, 1: 0.25, 2: 0.0}
    assert train(folder, "steps=1", values=values, config=VALIDATED) == 0
    assert main(["train", "--resume", "out/run", "steps=2", "run.keep=best"]) == 0
    assert report(folder)["validation"] == {"best_step": 1, "mean_reward": 0.25, "evaluations_since": 1}
    assert same(weights(folder), weights(folder, "best/step-000001"))
