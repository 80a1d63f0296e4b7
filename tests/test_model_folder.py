"""Model folders: what makes no model is one line wherever it is loaded, and nothing in a folder is run as code."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import pytest

from helpers import model_folder
from mlxrl.errors import UserError
from mlxrl.policy import model_folder as checks
from mlxrl.policy.policy import as_policy, load
from mlxrl.policy.skeleton import skeleton
from mlxrl.rollout.chat import render
from mlxrl.settings import LoRA
from mlxrl.types import Task
from models import dense, tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def model(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "model"))


def changed(name, **values):
    def change(folder):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def arrays(change):
    def rewrite(folder):
        path = str(folder / "model.safetensors")
        found = dict(mx.load(path))
        mx.eval(found)
        change(found)
        mx.save_safetensors(path, found)

    return rewrite


def packed(found):
    """Weights of 4 bits without their scales."""
    name = "model.layers.0.mlp.up_proj.weight"
    found[name] = mx.quantize(found[name], group_size=32, bits=4)[0]


def sharded(folder):
    names = {
        "model.norm.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def without(*patterns):
    def remove(folder):
        for pattern in patterns:
            for path in folder.glob(pattern):
                path.unlink()

    return remove


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


UP = "model.layers.0.mlp.up_proj"
QUANTISED = {"group_size": 32, "bits": 4}
FAULTS = {
    "a shard is missing": (sharded, "1 of 2 files of weights are missing, as model-00002-of-00002.safetensors"),
    "no weights": (without("*.safetensors"), "no weights; wanted files model*.safetensors"),
    "weights cut short": (cut, "model.safetensors: not a whole safetensors file: wanted "),
    "weights of another place": (
        written("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a"),
        "model.safetensors: not a whole safetensors file; fetch it again",
    ),
    "an array is missing": (arrays(lambda found: found.pop("model.norm.weight")), "Missing 1 parameters: model.norm"),
    "an array too many": (arrays(lambda found: found.update(x=mx.zeros(2))), "Received 1 parameters not in model: x"),
    "packed without scales": (arrays(packed), "mlp.up_proj.weight"),
    "quantised by name without scales": (
        changed("config.json", quantization={**QUANTISED, UP: QUANTISED}), "Missing 2 parameters",
    ),
    "quantised in groups of 0": (changed("config.json", quantization={UP: {"group_size": 0}}), "group_size: wanted"),
    "a billion layers": (
        changed("config.json", num_hidden_layers=10**9),
        "config.json: num_hidden_layers: wanted at most the 24 arrays of its files, got 1000000000",
    ),
    "layers of 400 digits": (changed("config.json", num_hidden_layers=10**400), "num_hidden_layers: wanted at most"),
    "a billion layers in a part": (changed("config.json", text_config={"n_layers": 10**9}), "n_layers: wanted at most"),
    "fewer layers than there are": (changed("config.json", num_hidden_layers=-1), "parameters not in model"),
    "a width of a billion": (changed("config.json", hidden_size=10**9), "parameter"),
    "a width of 10**18": (changed("config.json", hidden_size=10**18), ""),
    "no heads": (changed("config.json", num_attention_heads=0), "ZeroDivisionError"),
    "no model type": (changed("config.json", model_type=None), "config.json: model_type: wanted a text, got nothing"),
    "an unknown type": (changed("config.json", model_type="nosuch"), "Model type nosuch not supported"),
    "a type that wants a package": (changed("config.json", model_type="olmo"), "mlx-lm gave up, and says above what"),
    "a config that is a list": (written("config.json", "[1]"), "config.json: wanted a JSON object, got [1]"),
    "a config of bytes": (written("config.json", b"\xff\xfe\x00"), "config.json: not JSON: UnicodeDecodeError"),
    "no tokenizer": (without("tokenizer*", "special*", "chat*"), "no tokenizer; wanted tokenizer.json"),
    "a stop token beyond": (changed("config.json", eos_token_id=[2, 5000]), "eos_token_id: wanted an id below 320"),
    "a stop token before": (changed("config.json", eos_token_id=[-1]), "eos_token_id: wanted an id below 320, got -1"),
    "a stop token as text": (changed("config.json", eos_token_id="<eos>"), "eos_token_id"),
    "a stop token elsewhere": (written("generation_config.json", '{"eos_token_id": 400}'), "eos_token_id: wanted an i"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_makes_no_model_is_one_line_with_weights_and_without(fault, model):
    change, message = FAULTS[fault]
    change(model)
    for make in (load, skeleton):
        with pytest.raises(UserError) as caught:
            make(str(model))
        assert str(caught.value).startswith(f"model: id: {model} could not be loaded: ")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_template_that_does_not_end_is_stopped(model, monkeypatch):
    loops = "".join(f"{{% for {name} in range(99999) %}}" for name in "ijk") + "{% endfor %}" * 3
    (model / "chat_template.jinja").write_text(loops)
    monkeypatch.setattr(checks, "SECONDS", 0.1)
    with pytest.raises(UserError, match=r"its chat template has not ended after 0\.1 s on one short message"):
        load(str(model))
    (model / "chat_template.jinja").write_text("{{ raise_exception('wants a system message') }}")
    monkeypatch.setattr(checks, "SECONDS", 10)
    load(str(model))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value, model):
    def damage(found):
        found["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    arrays(damage)(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said of the head
        with pytest.raises(UserError, match=f"model: {model}: model.layers.1.mlp.up_proj.weight holds NaN or infinity"):
            load(str(model), lora=None)
        with pytest.raises(UserError, match="holds NaN or infinity"):
            load(str(model), lora=LoRA())


def test_weights_too_large_for_their_type_are_told(model):
    arrays(lambda found: found.update({"model.norm.weight": mx.full((64,), 1e6)}))(model)
    load(str(model))
    with pytest.raises(UserError, match=r"model\.norm\.weight holds NaN or infinity; .* too large for their type"):
        load(str(model), dtype="float16")


def test_logits_that_are_not_finite_say_nothing_of_the_head():
    model = dense()
    model.model.norm.weight = mx.full((64,), 3e38)
    assert not mx.all(mx.isfinite(model(mx.array([[0, 1, 2]])))).item()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_policy(model, tokenizer(), lora=None)


class Runs:
    """An object that runs code where it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (Path(self.marker),)


def code(marker):
    """Python that leaves a mark, and has every class that anything could ask it for."""
    return (
        f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n"
        "class Model: pass\nclass ModelArgs: pass\nclass Own: pass\nparse_tool_call = apply_chat_template = Own\n"
    )


def python(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code(folder.parent / "ran"))


MAP = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}
PICKLES = ("model.bin", "pytorch_model.bin", "model.pt", "training_args.bin", "vocab.pkl", "tokenizer.pickle")
TRIES = {
    "auto_map of the model": [changed("config.json", auto_map=MAP)],
    "auto_map of the tokenizer": [changed("tokenizer_config.json", auto_map=MAP)],
    "auto_map of an unknown tokenizer": [changed("tokenizer_config.json", auto_map=MAP, tokenizer_class="Own")],
    "a tokenizer of a module": [changed("tokenizer_config.json", tokenizer_class="own.Own")],
    "model_file": [changed("config.json", model_file="own.py")],
    "a model type of the folder": [changed("config.json", model_type="own")],
    "a model type that is a path": [lambda folder: changed("config.json", model_type=str(folder / "own"))(folder)],
    "a model type that climbs": [changed("config.json", model_type="..own")],
    "custom_generate": [changed("config.json", custom_generate=".")],
    "custom_generate of the settings": [written("generation_config.json", '{"custom_generate": "own.py"}')],
    "a parser of the folder": [changed("tokenizer_config.json", tool_parser_type="own")],
    "a template of the folder": [changed("tokenizer_config.json", chat_template_type="own")],
    "an architecture of the folder": [changed("config.json", architectures=["own.Own"], trust_remote_code=True)],
    "a template that reaches for Python": [
        written(
            "chat_template.jinja", "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os }}"
        )
    ],
    "weights that are pickles": [without("*.safetensors")],
    "pickles beside the weights": [],
}


@pytest.mark.parametrize("attempt", TRIES)
def test_nothing_in_a_model_folder_is_run(attempt, model, monkeypatch):
    """Either the model is loaded without it, or it is refused in one line; nobody is asked."""
    for folder in (model, model / "custom_generate"):
        python(
            folder,
            "own.py",
            "modeling_qwen3.py",
            "tokenization_own.py",
            "generate.py",
            "sitecustomize.py",
            "__init__.py",
        )
    for name in PICKLES:
        (model / name).write_bytes(pickle.dumps(Runs(model.parent / "ran")))
    for change in TRIES[attempt]:
        change(model)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    for make in (load, skeleton):
        with suppress(UserError):
            found = make(str(model))
            assert "module" not in found.tokenizer.decode(render(found.tokenizer, Task("hi")))
        assert not (model.parent / "ran").exists()
    pickle.loads((model / PICKLES[0]).read_bytes())
    assert (model.parent / "ran").exists()  # what would have been left
