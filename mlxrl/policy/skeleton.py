"""A model whose weights are not in memory, and models with its first layers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl.errors import UserError
from mlxrl.files import expanded
from mlxrl.policy import gguf
from mlxrl.policy.adapter_folder import load_weights
from mlxrl.policy.differentiate import leaves
from mlxrl.policy.lora import Adapted, adapt, adapted
from mlxrl.policy.model_folder import COUNTS
from mlxrl.policy.policy import built, folder_of, load_mlx_lm
from mlxrl.settings import LoRA

FEW, SOME = 2, 6
"""Layers that stand for those of a model with more."""
ROWS = 251
"""Rows of a vocabulary that are made at random, and repeated: 251, which is no layer's width."""


class NotHere(UserError):
    """A model whose files are not on this machine."""


class Skeleton:
    """A model of which nothing has been evaluated.

    loading: bytes of its files, where they are in memory while weights of other types are made of them.
    vocabulary: its tokens. counts: numbers of first layers, each with a weight: what is linear in the layers of each
    kind is for the whole model the sum of what it is for these, so weighted.
    """

    def __init__(self, id: str, config: Mapping[str, Any], model: Any, tokenizer: Any, loading: int = 0) -> None:
        self.id, self.config, self.model, self.tokenizer, self.loading = id, config, model, tokenizer, loading
        self.vocabulary = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
        self._types = {name: array.dtype for name, array in leaves(model.parameters())}
        self._modules = dict(model.named_modules())
        self._kinds = _kinds(model)
        self.counts = self._chosen()

    def first_layers(self, layers: int, vocabulary: int) -> Any:
        """A random model with the first layers and so much of the vocabulary, in the same types and bits, in memory."""
        model, rows = self._built(layers), mx.arange(min(vocabulary, self.vocabulary)) % ROWS
        words = [(name, array[rows]) for name, array in leaves(model.parameters()) if array.shape[:1] == (ROWS,)]
        model.load_weights(words, strict=False)
        for _, array in leaves(model.parameters()):
            mx.eval(array)  # one at a time: making a packed one takes more than it keeps
        return model

    def _chosen(self) -> list[tuple[int, float]]:
        """A few and some, where the layers in between are of each kind in the proportion of what is left; else all."""
        total, every = len(self._kinds), Counter(self._kinds)
        for last in range(SOME, total):
            for first in range(FEW, last - (SOME - FEW) + 1):
                low, high = (Counter(self._kinds[:count]) for count in (first, last))
                steady = [(every[k] - low[k]) * (last - first) == (high[k] - low[k]) * (total - first) for k in every]
                if len(low) == len(every) and all(steady) and self._right(first) and self._right(last):
                    share = (total - first) / (last - first)
                    return [(first, 1 - share), (last, share)]
        return [(total, 1.0)]

    def _right(self, layers: int) -> bool:
        """Whether a model of the first layers can be built, and has just these."""
        try:
            return _kinds(self._built(layers)) == self._kinds[:layers]
        except Exception:  # noqa: BLE001  (a model's constructor, with a config that its authors have not seen)
            return False

    def _built(self, layers: int) -> Any:
        """The model with its first layers and ROWS of its vocabulary, of which nothing is evaluated."""
        model = built({**self._cut(self.config, layers), "quantization": None})
        nn.quantize(model, class_predicate=lambda name, _: _packing(self._modules[name]))
        model.load_weights([(name, array.astype(self._types[name])) for name, array in leaves(model.parameters())])
        return model

    def _cut(self, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        """The config of a model with the first layers: its counts, and lists and patterns with an entry for each."""
        total, cut = len(self._kinds), dict(config)
        for name, value in config.items():
            if isinstance(value, Mapping):
                cut[name] = self._cut(value, layers)
            elif isinstance(value, list) or (isinstance(value, str) and name.endswith("pattern")):
                cut[name] = value[:layers] if len(value) == total else value
            elif name in COUNTS and value == total:
                cut[name] = layers
            elif name == "vocab_size" and value == self.vocabulary:
                cut[name] = ROWS
        return cut


def skeleton(id: str, dtype: str | None = None) -> Skeleton:
    """The skeleton of a folder, of a Hugging Face id that was fetched before, or of a .gguf file.

    Raises:
        UserError: its files are not here, or make no model.
    """
    path, folder = expanded(id), folder_of(id)
    if id.endswith(".gguf"):
        config, tokenizer, usual = gguf.outline(path, packed=dtype is None)
        model, files = built(config), [path]
        model.set_dtype(getattr(mx, dtype) if dtype else usual)
    elif folder is None:
        raise NotHere("model", "id", f"{id} is not on this machine yet")
    else:
        model, tokenizer, config = load_mlx_lm(id, folder, lazy=True)
        files = list(folder.glob("*.safetensors")) if dtype else []
        if dtype:
            model.set_dtype(getattr(mx, dtype))
    return Skeleton(id, config, model, tokenizer, sum(file.stat().st_size for file in files))


def outline(model: Skeleton, lora: LoRA, adapter: str | None = None) -> list[Adapted]:
    """What `load` would adapt, without loading weights but those of an adapter.

    Raises:
        AdapterError: a key matches nothing, or it is not the model's adapter.
    """
    adapt(model.model, lora)
    if adapter is not None:
        load_weights(model.model, adapter)
    return adapted(model.model)


def _packing(module: Any) -> dict[str, Any] | bool:
    names = [name for name in ("group_size", "bits", "mode") if hasattr(module, name)]
    return {name: getattr(module, name) for name in names} if "scales" in module else False


def _kinds(model: Any) -> list[Hashable]:
    """What each layer is: the classes in it, its arrays' shapes and types, and its cache."""
    from mlx_lm.models.cache import make_prompt_cache

    layers, caches = model.layers, make_prompt_cache(model)
    if len(caches) != len(layers):
        caches = [None] * len(layers)
    return [
        (
            *(type(cache), getattr(cache, "max_size", None)),
            *sorted((name, str(type(module))) for name, module in layer.named_modules()),
            *sorted((name, tuple(array.shape), str(array.dtype)) for name, array in leaves(layer.parameters())),
        )
        for layer, cache in zip(layers, caches, strict=True)
    ]
