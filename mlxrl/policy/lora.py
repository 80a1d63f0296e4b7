"""LoRA adapters: put on a model, taken off for the reference, merged for decoding."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl.errors import UserError, did_you_mean, one_line
from mlxrl.policy.differentiate import leaves
from mlxrl.settings import LoRA

LEAVES = ("lora_a", "lora_b", "m")
ROUTERS = ("gate", "router", "shared_expert_gate", "modality_router", "prediction_coefs", "correction_coefs")


class AdapterError(UserError):
    """An adapter that a model cannot have, or whose files cannot be read."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """What was adapted under one key: the layers' class and shape, how many they are, the adapters' parameters."""

    key: str
    layer: str
    shape: tuple[int, ...]
    count: int
    parameters: int


def adapt(model: Any, lora: LoRA, seed: int = 0) -> LoRA:
    """Freeze a model and put adapters on it; afterwards only their leaves are trainable.

    Returns:
        the settings with the names of what was adapted.
    Raises:
        AdapterError: a key matches nothing; the message lists the names that exist.
    """
    from mlx_lm.tuner.utils import linear_to_lora_layers

    layers = min(lora.layers or len(model.layers), len(model.layers))
    keys = resolve_keys(model, lora.keys, layers)
    _check_layers(model, lora, keys, layers)
    model.freeze()
    config = {"rank": lora.rank, "scale": lora.scale, "dropout": lora.dropout, "keys": keys}
    try:
        linear_to_lora_layers(model, layers, config, use_dora=lora.dora)
    except ValueError as error:  # a name may be of another kind of layer in some block
        why = f"{type(model).__module__} has such layers: {one_line(error)}; leave their names out"
        raise AdapterError("lora", "keys", why) from error
    _initialise(model, seed)
    names = [name for name, _ in leaves(model.trainable_parameters())]
    assert names, "no adapter is trainable"
    strangers = [name for name in names if name.rsplit(".", 1)[-1] not in LEAVES]
    assert not strangers, f"trainable parameters outside the adapters: {strangers[:3]}"
    return replace(lora, keys=tuple(keys))


def resolve_keys(model: Any, keys: Sequence[str] | None, layers: int) -> list[str]:
    """The names that mlx-lm adapts in the last blocks: those meant, or every linear layer.

    A key is a name in a block or in the model, or the end of such names: `q_proj` is `self_attn.q_proj`. The name in
    the model of a layer in a block, `model.layers.3.self_attn.q_proj`, is that layer alone.
    """
    block_names = sorted({name for block in model.layers[-layers:] for name in _adaptable(block)})
    if keys is None:
        return [name for name in block_names if name.rsplit(".", 1)[-1] not in ROUTERS]
    every = _adaptable(model)
    known = [*block_names, *(name for name in every if ".layers." not in f".{name}")]
    found: dict[str, None] = {}
    for key in keys:
        meant = [key] if key in known or key in every else [name for name in known if name.endswith(f".{key}")]
        if not meant:
            near = did_you_mean(key, [*known, *(name.rsplit(".", 1)[-1] for name in known)])
            why = f"{key!r} matches no layer{near}; the names are: {', '.join(known)}"
            raise AdapterError("lora", "keys", why)
        found |= dict.fromkeys(meant)
    return list(found)


def _check_layers(model: Any, lora: LoRA, keys: Sequence[str], layers: int) -> None:
    """AdapterError for a rank that no layer can have, and for layers that cannot have DoRA."""
    chosen = [dict(block.named_modules()) for block in model.layers[-layers:]] + [dict(model.named_modules())]
    found = {name: modules[name] for modules in chosen for name in keys if name in modules}
    if not found:
        why = f"wanted a linear layer in the last {layers} blocks of {type(model).__module__}, found none"
        raise AdapterError("lora", "keys", why)
    widest = max(min(_outputs_and_inputs(module)) for module in found.values() if "weight" in module)
    if lora.rank > widest:
        raise AdapterError(
            "lora", "rank", f"wanted at most {widest}, the full rank of the widest layer, got {lora.rank}"
        )
    kinds = (nn.Linear, nn.QuantizedLinear, nn.Embedding)
    if lora.dora and (name := next((name for name, one in found.items() if not isinstance(one, kinds)), None)):
        why = f"{name} is a {type(found[name]).__name__}, for which mlx-lm has no DoRA; leave it out of lora.keys"
        raise AdapterError("lora", "dora", why)


def _outputs_and_inputs(module: Any) -> tuple[int, int]:
    *_, outputs, inputs = module.weight.shape
    return outputs, inputs * 32 // module.bits if "scales" in module else inputs


def _adaptable(module: nn.Module) -> list[str]:
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    kinds = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear, nn.Embedding, nn.QuantizedEmbedding)
    return [name for name, child in module.named_modules() if isinstance(child, kinds) or hasattr(child, "to_lora")]


def _initialise(model: nn.Module, seed: int) -> None:
    """Draw every A anew, uniform within 1 / sqrt(inputs) as mlx-lm does, from a key of our own."""
    found = sorted(model.named_modules(), key=lambda item: item[0])
    adapters = [module for _, module in found if base_of(module) is not None]
    for module, key in zip(adapters, mx.random.split(mx.random.key(seed), len(adapters)), strict=True):
        shape = module.lora_a.shape
        bound = (shape[-1] if len(shape) == 3 else shape[0]) ** -0.5
        module.lora_a = mx.random.uniform(-bound, bound, shape, key=key)
    mx.eval(model.trainable_parameters())


def adapted(model: nn.Module) -> list[Adapted]:
    """What was adapted, an entry for every key and shape."""
    lines: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for name, module in model.named_modules():
        if (base := base_of(module)) is None:
            continue
        key = name_in_block(name)
        size = sum(value.size for _, value in leaves(module.trainable_parameters()))
        lines.setdefault((key, type(base).__name__, tuple(base.weight.shape)), []).append(size)
    return [Adapted(*where, len(sizes), sum(sizes)) for where, sizes in sorted(lines.items())]


def name_in_block(name: str) -> str:
    """A layer's name in its block, or in the model where it stands in none."""
    return name.split(".layers.")[-1].split(".", 1)[-1] if ".layers." in name else name


def base_of(module: nn.Module) -> Any | None:
    """The layer inside an adapter, None for a module that is none. The attribute is mlx-lm's name for it."""
    if "lora_a" not in module:
        return None
    return module.linear if "linear" in module else module.embedding


@contextmanager
def without_adapters(model: Any) -> Generator[None]:
    """A block in which a model or policy is without its adapters: the base, bit for bit.

    All of mlx-lm's adapters are covered: LoRALinear, LoRASwitchLinear, LoRAEmbedding and DoRA. The layers are
    swapped, not scaled by zero, because a scale would be baked into a compiled trace. For scoring without adapters
    there is `modes.scoring`.
    """
    layers: list[tuple[Any, Any, Any]] = []
    for container, adapters in adapters_of(model if isinstance(model, nn.Module) else model.model):
        layers += ((container, key, base_of(adapter)) for key, adapter in adapters.items())
    with swapped(layers):
        yield


@contextmanager
def with_leaves(model: nn.Module, values: Mapping[str, mx.array]) -> Generator[None]:
    """A block in which the adapters have other values, by the leaves' names."""
    own = [(name, array) for name, array in leaves(model.parameters()) if name in values]
    try:
        model.load_weights(list(values.items()), strict=False)
        yield
    finally:
        model.load_weights(own, strict=False)


@contextmanager
def swapped(layers: Sequence[tuple[Any, Any, Any]]) -> Generator[None]:
    """A block in which layers are in place of others, each given as (container, key, layer)."""
    own = [container[key] for container, key, _ in layers]
    try:
        for container, key, layer in layers:
            container[key] = layer
        yield
    finally:
        for (container, key, _), layer in zip(layers, own, strict=True):
            container[key] = layer


def adapters_of(tree: Any) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """Every module, list and dict of a tree that has adapters in it, and these by their keys."""
    items = dict(tree.items() if isinstance(tree, dict) else enumerate(tree))
    found = {key: value for key, value in items.items() if isinstance(value, nn.Module) and "lora_a" in value}
    if found:
        yield tree, found
    for key, value in items.items():
        if key not in found and isinstance(value, (dict, list)):
            yield from adapters_of(value)


class SharedLoraInput:
    """An input as [N, inputs] and its product with A, computed for the first of the layers that read it."""

    def __init__(self) -> None:
        self.input: mx.array | None = None
        self.product: tuple[mx.array, mx.array] | None = None

    def of(self, x: mx.array, a: mx.array) -> tuple[mx.array, mx.array]:
        """x [N, inputs] and x A [N, sum of ranks]."""
        if self.product is None or self.input is not x:
            flat = x.reshape(-1, x.shape[-1])
            self.input, self.product = x, (flat, flat @ a)
        return self.product

    def clear(self) -> None:
        """Free the arrays of a forward pass."""
        self.input = self.product = None


class MergedLinear(nn.Module):
    """y = W x + B A x in fewer steps than mlx-lm's LoRALinear, which multiplies by A, by B, by the scale, and adds.

    The scale is in B, the sum in the product. A [inputs, sum of ranks] is shared by the layers that read one input;
    this layer's columns begin at `start`. All positions lie in one axis: a batch axis would make the last product
    one of many small ones.
    """

    def __init__(self, linear: nn.Module, a: mx.array, b: mx.array, start: int, shared: SharedLoraInput) -> None:
        super().__init__()
        self.linear, self.a, self.b = linear, a, b
        self._start, self._shared = start, shared

    def __call__(self, x: mx.array) -> mx.array:
        """[..., outputs]."""
        flat, z = self._shared.of(x, self.a)
        y, z = self.linear(flat), z[:, self._start : self._start + self.b.shape[0]]
        y = mx.addmm(y, z, self.b) if y.dtype == z.dtype else y + (z @ self.b).astype(y.dtype)
        return y.reshape(*x.shape[:-1], -1)


@contextmanager
def merged(model: nn.Module) -> Generator[list[SharedLoraInput]]:
    """A block in which a model's LoRA layers are merged ones; yields what must be cleared after each forward."""
    from mlx_lm.tuner.lora import LoRALinear

    inputs: list[SharedLoraInput] = []
    layers: list[tuple[Any, Any, MergedLinear]] = []
    for container, adapters in adapters_of(model):
        readers: dict[Any, dict[Any, LoRALinear]] = {}  # of one width and dtype, which may read the same input
        for key, layer in adapters.items():
            if type(layer) is LoRALinear:
                readers.setdefault((layer.lora_a.shape[0], layer.lora_a.dtype), {})[key] = layer
        for alike in readers.values():
            inputs.append(SharedLoraInput())
            layers += ((container, key, layer) for key, layer in _merge(alike, inputs[-1]))
    with swapped(layers):
        mx.eval(model.parameters())
        yield inputs


def _merge(layers: dict[Any, Any], shared: SharedLoraInput) -> Iterator[tuple[Any, MergedLinear]]:
    a, start = mx.concatenate([layer.lora_a for layer in layers.values()], axis=1), 0
    for key, layer in layers.items():
        yield key, MergedLinear(layer.linear, a, layer.scale * layer.lora_b, start, shared)
        start += layer.lora_a.shape[1]
