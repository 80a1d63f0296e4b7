"""LoRA adapters: put on a model, taken off for the reference, saved and loaded in mlx-lm's folder format."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl.errors import UserError, did_you_mean, one_line
from mlxrl.files import replacing, write_json
from mlxrl.policy.differentiate import leaves
from mlxrl.settings import LoRA

LEAVES = ("lora_a", "lora_b", "m")
ROUTERS = ("gate", "router", "shared_expert_gate")


class AdapterError(UserError):
    """An adapter that a model cannot have, or whose files cannot be read."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """A line of the table of what was adapted: a key, its layer's class and shape, in how many places."""

    key: str
    layer: str
    shape: tuple[int, ...]
    count: int
    parameters: int


def adapt(model: nn.Module, lora: LoRA, seed: int = 0) -> None:
    """Freeze a model and put adapters on it; afterwards only their leaves are trainable.

    Raises:
        AdapterError: a key matches nothing; the message lists the names that exist.
    """
    from mlx_lm.tuner.utils import linear_to_lora_layers

    keys = resolve_keys(model, lora.keys)
    model.freeze()
    config = {"rank": lora.rank, "scale": lora.scale, "dropout": lora.dropout, "keys": keys}
    linear_to_lora_layers(model, len(layers_of(model)), config)
    _initialise(model, seed)
    assert_only_adapters(model)


def layers_of(model: Any) -> Sequence[nn.Module]:
    """The model's blocks."""
    return model.layers


def resolve_keys(model: nn.Module, keys: Sequence[str] | None) -> list[str]:
    """The names mlx-lm adapts: those asked for, checked, or every linear layer of the blocks."""
    block_names = sorted({name for block in layers_of(model) for name in _adaptable(block)})
    if keys is None:
        return [name for name in block_names if name.rsplit(".", 1)[-1] not in ROUTERS]
    known = [*block_names, *(name for name in _adaptable(model) if ".layers." not in f".{name}")]
    for key in keys:
        if key not in known:
            hint = f"{did_you_mean(key, known)}; the names are: {', '.join(known)}"
            raise AdapterError("lora", "keys", f"{key!r} matches no layer{hint}")
    return list(keys)


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


def assert_only_adapters(model: nn.Module) -> None:
    """Check that something is trainable, and nothing but adapters."""
    names = [name for name, _ in leaves(model.trainable_parameters())]
    assert names, "no adapter is trainable"
    strangers = [name for name in names if name.rsplit(".", 1)[-1] not in LEAVES]
    assert not strangers, f"trainable parameters outside the adapters: {strangers[:3]}"


def adapted(model: nn.Module) -> list[Adapted]:
    """The table of what was adapted, a line for every key and shape."""
    lines: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for name, module in model.named_modules():
        if (base := base_of(module)) is None:
            continue
        key = name.split(".layers.")[-1].split(".", 1)[-1] if ".layers." in name else name
        size = sum(value.size for _, value in leaves(module.trainable_parameters()))
        lines.setdefault((key, type(base).__name__, tuple(base.weight.shape)), []).append(size)
    return [Adapted(*where, len(sizes), sum(sizes)) for where, sizes in sorted(lines.items())]


def base_of(module: nn.Module) -> Any | None:
    """The layer inside an adapter, None for a module that is none. The attribute is mlx-lm's name for it."""
    if "lora_a" not in module:
        return None
    return module.linear if "linear" in module else module.embedding


@contextmanager
def without_adapters(model: Any) -> Generator[None]:
    """Take every adapter off a model or policy for the span of a block: inside it, it is the base, bit for bit.

    All of mlx-lm's adapters are covered: LoRALinear, LoRASwitchLinear, LoRAEmbedding and DoRA. The layers are
    swapped, not scaled by zero, because a scale would be baked into a compiled trace. For scoring without adapters
    there is `modes.scoring`.
    """
    model = model if isinstance(model, nn.Module) else model.model
    found = list(_adapters(model))
    try:
        for container, key, adapter in found:
            container[key] = base_of(adapter)
        yield
    finally:
        for container, key, adapter in found:
            container[key] = adapter


def _adapters(tree: Any) -> Iterator[tuple[Any, Any, nn.Module]]:
    """(container, key, adapter) of every adapter below a module, a list or a dict."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        if isinstance(value, nn.Module) and base_of(value) is not None:
            yield tree, key, value
        elif isinstance(value, (dict, list)):
            yield from _adapters(value)


def save(model: nn.Module, lora: LoRA, folder: str | Path, source: str) -> None:
    """Write `adapters.safetensors` and `adapter_config.json` as mlx-lm reads them, each in one piece."""
    folder = Path(folder)
    keys = sorted({line.key for line in adapted(model)})
    config = {
        "fine_tune_type": "lora",
        "model": source,
        "num_layers": len(layers_of(model)),
        "lora_parameters": {"rank": lora.rank, "scale": lora.scale, "dropout": lora.dropout, "keys": keys},
    }
    write_json(folder / "adapter_config.json", config)
    with replacing(folder / "adapters.safetensors") as temporary:
        mx.save_safetensors(str(temporary), dict(leaves(model.trainable_parameters())))


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Read the adapter weights of a folder into a model that is adapted in the same way.

    Raises:
        AdapterError: the folder's tensors are not those of the model's adapters.
    """
    path = _file(folder, "adapters.safetensors")
    try:
        weights: dict[str, mx.array] = mx.load(str(path))  # pyright: ignore
    except RuntimeError as error:
        raise AdapterError(str(path), f"not a whole safetensors file: {one_line(error)}") from error
    wanted = {name: value.shape for name, value in leaves(model.trainable_parameters())}
    got = {name: value.shape for name, value in weights.items()}
    if wanted != got:
        name, shape = sorted(set(wanted.items()) ^ set(got.items()))[0]
        difference = f"not the adapter of this model and [lora] table; first difference: {name} {shape}"
        raise AdapterError(str(path), difference)
    model.load_weights(list(weights.items()), strict=False)
    mx.eval(model.trainable_parameters())


def read_config(folder: str | Path) -> LoRA:
    """The LoRA settings of an adapter folder."""
    path = _file(folder, "adapter_config.json")
    try:
        given = json.loads(path.read_text(encoding="utf-8"))["lora_parameters"]
        return LoRA(rank=given["rank"], scale=given["scale"], dropout=given["dropout"], keys=given.get("keys"))
    except UserError as error:
        raise error.within(str(path)) from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise AdapterError(str(path), f"wanted lora_parameters with rank, scale, dropout, got {error!r}") from error


def _file(folder: str | Path, name: str) -> Path:
    path = Path(folder) / name
    if not path.is_file():
        raise AdapterError(str(folder), f"no {name}; wanted a folder that a run or mlx-lm has saved")
    return path
