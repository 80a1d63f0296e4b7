"""From a name to a policy, and what it would be without its weights."""

from __future__ import annotations

import json
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from helpers import made, model_folder
from mlxrl.algo.recipes import grpo
from mlxrl.errors import UserError
from mlxrl.policy.policy import as_policy, folder_of, load
from mlxrl.policy.skeleton import NotHere, outline, skeleton
from mlxrl.rollout.sample import sample
from mlxrl.settings import LoRA, Sampling
from mlxrl.train.batch import make_batch
from mlxrl.train.gradient import gradient
from mlxrl.types import Feedback, Task
from models import TEMPLATE, dense, tokenizer


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """An id whose files are in the cache of the Hugging Face hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abcd")
    return model_folder(repository / "snapshots" / "0123abcd")


@pytest.mark.parametrize("id", ["./nowhere", "/nowhere/at/all", "nowhere.gguf"])
def test_a_model_that_is_not_there_is_one_line(id):
    with pytest.raises(UserError, match=r"model: id: no (folder|file)"):
        load(id)


def test_what_cannot_be_loaded_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json; wanted an mlx-lm model folder"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "no such\\nmodel"}')
    with pytest.raises(UserError, match="no weights; wanted files model") as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r'model: dtype: wanted one of "float32", "bfloat16", "float16", got "float8"'):
        load(str(tmp_path), dtype="float8")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_have_the_type_that_was_asked_for(tmp_path, dtype):
    p = load(str(model_folder(tmp_path)), dtype=dtype, lora=None)
    wanted = mx.float32 if dtype is None else mx.bfloat16
    assert all(array.dtype == wanted for _, array in tree_flatten(p.model.parameters()))
    assert p.trainable_parameters == 0
    assert p.shares_prefix


def test_an_outline_is_what_loading_adapts(tmp_path):
    folder, lora = str(model_folder(tmp_path)), LoRA(rank=4)
    assert outline(skeleton(folder), lora) == load(folder, lora=lora).adapted


def test_an_id_that_was_fetched_before_is_outlined_too(cached):
    assert folder_of("org/tiny") == cached
    assert outline(skeleton("org/tiny"), LoRA()) == as_policy(dense(), tokenizer(), lora=LoRA()).adapted
    assert folder_of("org/other") is None
    with pytest.raises(NotHere, match="org/other is not on this machine yet"):
        skeleton("org/other")
    assert folder_of("./nowhere") is None


def test_a_config_that_makes_no_model_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UserError, match="no weights; wanted files model"):
        skeleton(str(tmp_path))


@pytest.mark.parametrize(("change", "message"), [
    ({"vocab_size": 40}, "its tokenizer: wanted token ids that the model has, 0 to 39, got 40"),
    ({"eos_token_id": 5000}, "eos_token_id: wanted an id below 320, got 5000"),
])  # fmt: skip
def test_a_vocabulary_smaller_than_the_tokenizer_is_refused_at_load(tmp_path, change, message):
    path = model_folder(tmp_path / "model")
    weights, config = mx.load(str(path / "model.safetensors")), json.loads((path / "config.json").read_text())
    name = "model.embed_tokens.weight"
    mx.save_safetensors(str(path / "model.safetensors"), {**weights, name: weights[name][: change.get("vocab_size")]})
    (path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=message):
        load(str(path))


def test_special_tokens_that_a_model_is_without_are_refused_where_a_prompt_has_them(tmp_path):
    path = model_folder(tmp_path / "model")
    more = tokenizer()._tokenizer
    more.add_tokens(["<image>"] * 1 + [f"<extra{n}>" for n in range(60)], special_tokens=True)
    more.save_pretrained(path)
    p = load(str(path), lora=None)
    assert len(p.tokenizer.get_vocab()) == 326
    sample(p, [Task("what")], group_size=1, sampling=Sampling(max_tokens=1))
    with pytest.raises(UserError, match="prompt: wanted token ids that the model has, 0 to 319, got 325"):
        sample(p, [Task("what <extra59>")], group_size=1, sampling=Sampling(max_tokens=1))


def test_an_observation_with_a_token_that_the_model_does_not_have_ends_its_episode():
    class World:
        def reset(self, task):
            return "!"

        def step(self, reply):
            return Feedback("z")  # byte 122 has an id beyond 200

    p = as_policy(dense(vocab_size=70), tokenizer(), lora=None)
    narrow = TEMPLATE.replace("<think>", "").replace("</think>", "")
    p.tokenizer._tokenizer.chat_template = narrow
    with pytest.raises(UserError, match="step: prompt: wanted token ids that the model has, 0 to 69, got"):
        sample(p, [Task("!")], group_size=1, environment=World, sampling=Sampling(max_tokens=1))


def test_a_family_that_cannot_be_trained_is_refused_by_name(monkeypatch):
    class Partial(type(dense())):
        def freeze(self, **_):
            raise AttributeError("'Model' object has no attribute '_no_grad'")

    model = dense()
    model.__class__ = Partial
    with pytest.raises(UserError, match=r"test_policy: cannot be trained: 'Model' object has no attribute"):
        as_policy(model, tokenizer(), lora=LoRA())
    p, batch = as_policy(dense(), tokenizer(), lora=LoRA()), make_batch([made([1.0, 0.0])], grpo())
    own = p.head.trunk

    def trunk(tokens, cache=None):
        hidden = own(tokens, cache)
        return mx.take_along_axis(hidden, mx.argsort(hidden, axis=-1), axis=-1)

    kinky = replace(p, head=replace(p.head, trunk=trunk))
    with pytest.raises(UserError, match=r"mlx_lm\.models\.qwen3: cannot be trained, .* without a gradient: .*VJP"):
        gradient(kinky, batch, grpo())


def test_the_distance_from_the_start_is_the_norm_of_all_differences(tmp_path):
    p = as_policy(dense(), tokenizer(), lora=LoRA(rank=4))
    assert p.distance == 0
    leaves = tree_flatten(p.model.trainable_parameters())
    p.model.load_weights([(name, leaf + 0.5) for name, leaf in leaves], strict=False)
    assert p.distance == pytest.approx(0.5 * p.trainable_parameters**0.5)
    p.save(tmp_path / "adapter")
    again = load(str(model_folder(tmp_path / "model")), adapter=tmp_path / "adapter")
    assert again.distance == 0  # of what it was read with
    assert as_policy(dense(), tokenizer(), lora=None).distance == 0
