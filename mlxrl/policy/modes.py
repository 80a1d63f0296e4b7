"""The context managers that change a model for a while."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mlxrl.policy.load import Policy
from mlxrl.policy.merged_lora import merged


@contextmanager
def decoding(policy: Policy) -> Generator[Policy]:
    """The span in which a policy decodes, its adapters merged into fewer products; yields it as it is to be run."""
    assert not policy.model.training, "a policy that is in training cannot decode"
    with merged(policy.model) as shared:

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
