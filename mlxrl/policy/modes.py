"""The modes of a policy: the only context managers that change a model.

    with scoring(policy): ...                   log-probs that a loss compares with
    with scoring(policy, adapters=False): ...   the same of what training began from: a reference
    with training(policy, recompute=True): ...  log-probs whose gradient is taken
    with decoding(policy): ...                  sampling

A mode makes all its changes in one order, and undoes them in the opposite one, whatever ends its block. A model is in
one mode at a time: a mode inside another of the same model is an AssertionError. Scoring and training make the same
numbers at the same weights, because both run what a gradient needs:

1. The adapters go first, where they do: what is off the model is not changed by the rest.
2. `train()`: mlx-lm's layers choose kernels with a gradient by it, and make router indices constants. Dropout layers
   stay in evaluation, except in training where `dropout` is set.
3. Linear attention by chunks (`gated_delta.py`) and memory-efficient SwiGLU (`recompute.py`) are put where the
   layers look them up: in the modules of their classes, so they come before the next.
4. Recomputation (`recompute.py`) swaps the class of each layer for a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import mlx.nn as nn

from mlxrl.policy.gated_delta import chunked
from mlxrl.policy.lora import merged, with_leaves, without_adapters
from mlxrl.policy.policy import Policy
from mlxrl.policy.recompute import memory_efficient, recomputed


@contextmanager
def scoring(policy: Policy, adapters: bool = True) -> Generator[None]:
    """Log-probs to compare with, at the policy's weights or those that training began from."""
    model = policy.model
    began = without_adapters(model) if policy.start is None else with_leaves(model, policy.start)
    base = nullcontext() if adapters else began
    with _entered(model, "scoring"), base, _differentiable(model):
        yield


@contextmanager
def training(policy: Policy, recompute: bool = False, dropout: bool = False) -> Generator[None]:
    """Log-probs whose gradient is taken.

    Args:
        recompute: keep the inputs of layers alone, and run each once more in the backward pass.
        dropout: whether dropout layers drop.
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
def _differentiable(model: nn.Module, dropout: bool = False) -> Generator[None]:
    """Steps 2 and 3."""
    try:
        model.train()
        if not dropout:
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.eval()
        with chunked(), memory_efficient(model):
            yield
    finally:
        model.eval()
