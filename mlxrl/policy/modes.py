"""The modes of a policy: the only context managers that change a model.

    with scoring(policy): ...                   log-probs that a loss compares with
    with scoring(policy, adapters=False): ...   the same of what training began from: a reference
    with training(policy, recompute=True): ...  log-probs whose gradient is taken
    with decoding(policy): ...                  sampling
    with float32_activations(model): ...        logits by which models are compared

A mode makes all its changes in one order, and undoes them in the opposite one, whatever ends its block. A model is in
one mode at a time: a mode inside another of the same model is an AssertionError. Scoring and training make the same
numbers at the same weights, because both run what a gradient needs:

1. Adapters are taken off first, where they are: what is off the model is not changed by the rest.
2. `train()`: mlx-lm's layers choose kernels with a gradient by it, and make router indices constants. Dropout layers
   stay in evaluation. Those of adapters drop where a `dropout` is given, which is a number: inputs of a layer are
   dropped by a mask [D] that is made of it and of the layer's place, for every token, in every pass. So neither
   micro-batches, padding, shared prefixes nor recomputation change what is dropped.
3. Linear attention by chunks (`gated_delta.py`) and memory-efficient SwiGLU (`recompute.py`) are put where the
   layers look them up: in the modules of their classes, so they come before the next.
4. Recomputation (`recompute.py`) swaps the class of each layer for a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl.policy.gated_delta import chunked
from mlxrl.policy.lora import base_of, merged, with_leaves, without_adapters
from mlxrl.policy.policy import Policy
from mlxrl.policy.recompute import memory_efficient, recomputed


@contextmanager
def scoring(policy: Policy, adapters: bool = True, dropout: int | None = None) -> Generator[None]:
    """Log-probs to compare with, at the policy's weights or those that training began from.

    dropout: as in `training`.
    """
    model = policy.model
    began = without_adapters(model) if policy.start is None else with_leaves(model, policy.start)
    base = nullcontext() if adapters else began
    with _entered(model, "scoring"), base, _differentiable(model, dropout):
        yield


@contextmanager
def training(policy: Policy, recompute: bool = False, dropout: int | None = None) -> Generator[None]:
    """Log-probs whose gradient is taken.

    Args:
        recompute: keep the inputs of layers alone, and run each once more in the backward pass.
        dropout: a number from which follows what adapters drop; None drops nothing.
    """
    model = policy.model
    checkpointing = recomputed(model) if recompute else nullcontext()
    with _entered(model, "training"), _differentiable(model, dropout), checkpointing:
        yield


@contextmanager
def decoding(policy: Policy) -> Generator[Policy]:
    """The span in which a policy decodes, its adapters merged into fewer products; yields it as it is to be run."""
    with _entered(policy.model, "decoding"), merged(policy.model) as shared:

        def clearing(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                try:
                    return function(*arguments)
                finally:
                    for each in shared:
                        each.clear()

            return call

        head = replace(policy.head, trunk=clearing(policy.head.trunk), project=clearing(policy.head.project))
        yield replace(policy, head=head)


@contextmanager
def _entered(model: Any, mode: str) -> Generator[None]:
    """Note on a model which mode it is in; AssertionError where it is in one."""
    inside = getattr(model, "mlxrl_mode", None)
    assert inside is None, f"modes: {mode} inside {inside}: a model is in one mode at a time"
    model.mlxrl_mode = mode
    try:
        yield
    finally:
        del model.mlxrl_mode


@contextmanager
def _differentiable(model: nn.Module, dropout: int | None = None) -> Generator[None]:
    """Steps 2 and 3."""
    try:
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.eval()
        with _dropping(model, dropout), chunked(), memory_efficient(model):
            yield
    finally:
        model.eval()


@contextmanager
def _dropping(model: nn.Module, dropout: int | None) -> Generator[None]:
    """A block in which the adapters of a model drop inputs, by masks that follow from a number."""
    named = [] if dropout is None else sorted(model.named_modules(), key=lambda item: item[0])
    layers = [module.dropout for _, module in named if base_of(module) is not None]
    keys = mx.random.split(mx.random.key(dropout or 0), max(len(layers), 1))
    try:
        for layer, key in zip(layers, keys, strict=False):
            layer.__class__ = _MaskedDropout
            layer.__dict__["key"] = key
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Dropout
            layer.__dict__.pop("key", None)


class _MaskedDropout(nn.Dropout):
    """Dropout of the same inputs of every token, drawn from a key."""

    def __call__(self, x: mx.array) -> mx.array:
        if self._p_1 == 1:
            return x
        return mx.random.bernoulli(self._p_1, x.shape[-1:], key=self.__dict__["key"]) * x * (1 / self._p_1)


@contextmanager
def float32_activations(model: nn.Module) -> Generator[None]:
    """A block in which the vectors of a model's embeddings are float32; as heads they are as before."""
    layers: list[Any] = [one for one in model.modules() if isinstance(one, nn.Embedding | nn.QuantizedEmbedding)]
    classes = [type(layer) for layer in layers]
    try:
        for layer, own in zip(layers, classes, strict=True):
            layer.__class__ = _casting(own)
        yield
    finally:
        for layer, own in zip(layers, classes, strict=True):
            layer.__class__ = own


def _casting(own: Any) -> Any:
    return type(own.__name__, (own,), {"__call__": lambda layer, ids: own.__call__(layer, ids).astype(mx.float32)})
