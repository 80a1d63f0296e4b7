"""From a name to a policy, and what it would be without its weights."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from helpers import model_folder
from mlxrl.errors import UserError
from mlxrl.policy.policy import as_policy, folder_of, load
from mlxrl.policy.skeleton import NotHere, outline, skeleton
from mlxrl.settings import LoRA
from models import dense, tokenizer


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
    with pytest.raises(UserError, match="could not be loaded: ") as caught:
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
    with pytest.raises(UserError, match="could not be loaded"):
        skeleton(str(tmp_path))
