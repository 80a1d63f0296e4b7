"""One numeric case: inputs, hyper-parameters and golden results of another library's function, and how to compare.

Arrays of a case: `in_*` inputs, `out_*` and `metric_*` goldens in float64, computed by running the library itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrl import algo
from mlxrl.algo import Algorithm
from mlxrl.types import Logprobs, MicroBatch, Totals

Results = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """`case["rewards"]` is the input in_rewards as MLX array, `case.np(...)` as numpy, `case.out(...)` a golden."""

    family: str
    variant: str
    hyper: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @classmethod
    def load(cls, path: Path) -> Case:
        with np.load(path) as stored:
            arrays = {name: stored[name] for name in stored.files}
        meta = json.loads(str(arrays.pop("meta")))
        return cls(meta["family"], meta["variant"], meta["hyper"], arrays)

    def __contains__(self, name: str) -> bool:
        return f"in_{name}" in self.arrays

    def __getitem__(self, name: str) -> mx.array:
        array = self.np(name)
        return mx.array(array.astype(np.int32 if array.dtype.kind in "iu" and name != "mask" else np.float32))

    def get(self, name: str) -> mx.array | None:
        return self[name] if f"in_{name}" in self.arrays else None

    def np(self, name: str) -> np.ndarray:
        return self.arrays[f"in_{name}"]

    def out(self, name: str) -> np.ndarray:
        return self.arrays[f"out_{name}"]

    @property
    def goldens(self) -> list[str]:
        return [name for name in self.arrays if not name.startswith("in_")]

    @property
    def mask(self) -> mx.array:
        return self["mask"]

    @property
    def ids(self) -> list[int]:
        return self.np("group_ids").tolist()

    def per_token(self, values: Any) -> mx.array:
        """[B] or [B, T] as float32 [B, T]."""
        values = np.asarray(values, dtype=np.float32)
        values = values[:, None] if values.ndim == 1 else values
        return mx.array(np.broadcast_to(values, self.np("mask").shape))

    def totals(self, filled: bool = False, tokens: int | None = None, max_tokens: int = 1) -> Totals:
        """Counts of the case; `filled` counts only rows that have a token."""
        mask = self.np("mask")
        rows = int((mask.sum(axis=1) > 0).sum()) if filled else len(mask)
        return Totals(int(mask.sum()) if tokens is None else tokens, rows, 1, max_tokens)

    def minibatch(self, advantage: Any) -> MicroBatch:
        """The case as a minibatch; what it does not have is left out."""
        given = {
            f"{name}_logprobs": self[f"logp_{key}"]
            for name, key in (("old", "old"), ("reference", "ref"), ("teacher", "teacher"))
            if f"logp_{key}" in self
        }
        rollout = self["logp_rollout"] if "logp_rollout" in self else self["logp_old"]
        tokens = mx.zeros(self.mask.shape, dtype=mx.int32)
        return MicroBatch(tokens[0, :0], tokens, self.mask, self.per_token(advantage), rollout, **given)

    def run(self, recipe: Algorithm, totals: Totals, advantage: Any = None, **changes: Any) -> Run:
        """Loss, gradient with respect to the new log-probs, and metrics of a recipe's loss on this case."""
        batch = replace(self.minibatch(self.out("advantages") if advantage is None else advantage), **changes)

        def loss(new: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
            return recipe.loss(Logprobs(new, self.get("entropy")), batch, totals)

        (value, metrics), gradient = mx.value_and_grad(loss)(self["logp_new"])
        return Run(value, gradient, metrics)


@dataclass(frozen=True)
class Run:
    loss: mx.array
    gradient: mx.array
    metrics: dict[str, mx.array]

    def results(self, suffix: str = "") -> Results:
        if suffix:
            return {f"out_loss_{suffix}": self.loss, f"out_grad_{suffix}": self.gradient}
        return {"out_loss": self.loss, "out_grad_logp_new": self.gradient}


def made(name: str, convention: str | None = None, **table: Any) -> Any:
    """An algorithm by the keys of [algorithm]."""
    return algo.build({"name": name, "convention": convention, **table})


def gradient_of(function: Callable[[mx.array], mx.array], at: mx.array) -> tuple[mx.array, mx.array]:
    """Value and gradient of a scalar function."""
    return mx.value_and_grad(function)(at)


def faults(case: Case, got: Results) -> list[str]:
    """The goldens that `got` misses: |got - want| > 1e-5 |want| + 1e-6 S, S = max |want| but at least a floor.

    The floor is 1, for gradients 0.01. Flags and counts have to be equal.
    """
    found: list[str] = []
    for name, value in got.items():
        want = np.asarray(case.arrays[name], dtype=np.float64)
        value = np.asarray(value, dtype=np.float64)
        if want.shape != value.shape:
            found.append(f"{name}: shape {value.shape}, wanted {want.shape}")
            continue
        scale = max(np.abs(want).max(initial=0), 1e-2 if "grad" in name else 1.0)
        exact = case.arrays[name].dtype.kind in "iub"
        slack = 0 if exact else 1e-5 * np.abs(want) + 1e-6 * scale
        wrong = ~(np.abs(value - want) <= slack)
        if wrong.any():
            where = np.unravel_index(np.argmax(np.where(wrong, np.abs(value - want), -1)), want.shape)
            found.append(f"{name}{list(map(int, where))}: {value[where]!r}, wanted {want[where]!r}")
    return found
