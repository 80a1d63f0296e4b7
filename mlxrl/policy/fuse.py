"""The weights of a model with its adapters in them: W' = W + scale B A, of DoRA m (W + scale B A) / |W + scale B A|.

mlx-lm's layers have a `fuse` of their own. It rounds the update to the weights' type before the sum, takes DoRA's norms
in that type and leaves DoRA's weights in float32; its dequantisation knows three classes of layers and no global scale.
Here all is float32 and rounded once, and every packed layer is dequantised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlxrl.errors import UserError
from mlxrl.policy.differentiate import leaves
from mlxrl.policy.lora import base_of, without_adapters

PACKED = ("weight", "scales", "biases", "global_scale")


class FuseError(UserError):
    """An adapter that cannot be fused into its model, or whose fused model is another."""


def dense(layer: Any, arrays: Mapping[str, mx.array] | None = None) -> mx.array:
    """The weight of a layer in float32, dequantised: [outputs, inputs], of experts [E, outputs, inputs].

    arrays: in place of the layer's own.
    """
    parts: Any = arrays or layer
    weight, scales, biases, shared = (parts.get(name) for name in PACKED)
    if scales is None:
        return weight.astype(mx.float32)
    if biases is not None:  # of mode affine: in the scales' own type the product would be rounded
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    how: Any = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode, "dtype": mx.float32}
    if shared is None:
        return mx.dequantize(weight, scales, biases, **how)
    experts = zip(weight, scales, shared, strict=True)
    return mx.stack([mx.dequantize(w, s, global_scale=scale, **how) for w, s, scale in experts])


def fused(adapter: Any) -> mx.array:
    """W' of an adapter and the layer in it, in float32.

    A, B: of a linear layer [inputs, r] and [r, outputs]; of an embedding [V, r] and [r, dims]; of experts
    [E, r, inputs] and [E, outputs, r]. m: [outputs], the norms of the rows (DoRA, arXiv 2402.09353 eq. 5).
    """
    a, b = adapter.lora_a.astype(mx.float32), adapter.lora_b.astype(mx.float32)
    update = b @ a if a.ndim == 3 else a @ b if "embedding" in adapter else (a @ b).T
    weight = dense(base_of(adapter)) + adapter.scale * update
    if "m" not in adapter:
        return weight
    return (adapter.m.astype(mx.float32) / mx.linalg.norm(weight, axis=1))[:, None] * weight


def adapters_by_name(model: nn.Module) -> dict[str, Any]:
    """The adapters of a model, by the names of their layers."""
    return {name: module for name, module in model.named_modules() if base_of(module) is not None}


def packed_layers(model: nn.Module) -> dict[str, Any]:
    """The quantised layers of a model without its adapters, by their names."""
    with without_adapters(model):
        return {name: module for name, module in model.named_modules() if "scales" in module}


def float_type(model: nn.Module) -> mx.Dtype:
    """The type of most floating entries of a base: of its scales where it is quantised."""
    sizes: Counter[mx.Dtype] = Counter()
    with without_adapters(model):
        for _, array in leaves(model.parameters()):
            if mx.issubdtype(array.dtype, mx.floating):
                sizes[array.dtype] += array.size
    return sizes.most_common(1)[0][0]


def fused_arrays(model: nn.Module, quantised: bool) -> dict[str, mx.array]:
    """The arrays of a model with its adapters fused, by the names that the base's have; nothing is evaluated.

    quantised: packed layers stay packed, and are packed again where they have adapters; else all are dequantised.
    """
    usual, packed, adapters = float_type(model), packed_layers(model), adapters_by_name(model)
    with without_adapters(model):
        found = dict(leaves(model.parameters()))
    changed = {} if quantised else {name: (layer, dense(layer)) for name, layer in packed.items()}
    changed |= {name: (base_of(adapter), fused(adapter)) for name, adapter in adapters.items()}
    for name, (layer, weight) in changed.items():
        for part in PACKED:
            found.pop(f"{name}.{part}", None)
        found |= {f"{name}.{part}": array for part, array in _stored(layer, weight, usual, quantised).items()}
    return found


def loss_in_weights(model: nn.Module, quantised: bool) -> float:
    """|stored - W'| / |W' - W| over the layers with adapters: what of their change is lost as it is stored."""
    usual, error, change = float_type(model), 0.0, 0.0
    for adapter in adapters_by_name(model).values():
        layer, wanted = base_of(adapter), fused(adapter)
        kept = dense(layer, _stored(layer, wanted, usual, quantised))
        squares = mx.stack([mx.sum((kept - wanted) ** 2), mx.sum((wanted - dense(layer)) ** 2)])
        lost, made = cast(list[float], squares.tolist())  # evaluated layer by layer, for memory
        error, change = error + lost, change + made
    return (error / change) ** 0.5 if change else 0.0


def _stored(layer: Any, weight: mx.array, usual: mx.Dtype, quantised: bool) -> dict[str, mx.array]:
    """A float32 weight in the type of a layer, packed as the layer is where that is asked for."""
    weight = weight.astype(_type_of(layer, usual))
    if not quantised or "scales" not in layer:
        return {"weight": weight}
    if layer.get("global_scale") is not None:
        raise FuseError("--quantised", "wanted layers that MLX packs alike, got nvfp4 with a scale for each expert")
    parts = mx.quantize(weight, group_size=layer.group_size, bits=layer.bits, mode=layer.mode)
    return dict(zip(PACKED, parts, strict=False))


def _type_of(layer: Any, usual: mx.Dtype) -> mx.Dtype:
    dtype = layer.scales.dtype if "scales" in layer else layer.weight.dtype
    return dtype if mx.issubdtype(dtype, mx.floating) else usual
