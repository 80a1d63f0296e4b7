"""From a name to a policy: a model with its tokenizer, its adapters, and its head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrl import settings
from mlxrl.checked import Seed, checked_value, keywords
from mlxrl.errors import UserError, exception_line, one_line, require_open_files
from mlxrl.files import expanded
from mlxrl.policy import adapter_folder
from mlxrl.policy.differentiate import leaves
from mlxrl.policy.head import Head, split
from mlxrl.policy.lora import Adapted, adapt, adapted
from mlxrl.policy.model_folder import ModelError, check_folder, check_weights, tokenizer_fault
from mlxrl.policy.prefix import needs_caches, shares_prefix
from mlxrl.settings import LoRA

REMOTE = "trust_remote_code"
"""What transformers and mlx-lm ask for, to run code that comes with a model."""
TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
"""What transformers calls its line about prompts that are longer than the context."""


class TokenError(UserError):
    """A token id that a model does not have."""


@dataclass(frozen=True, slots=True, repr=False)
class Policy:
    """A language model that can be sampled, scored and updated.

    model: an mlx-lm model; tokenizer: mlx-lm's wrapper; head: the model in two parts; lora: None for a frozen model;
    shares_prefix: whether its caches can carry a shared prompt through the gradient; needs_caches: whether passes need
    them for any sequence; source: what it was loaded from.
    start: the adapters' leaves of the reference, by name, those that training goes on from; None for the base model.
    initial: the adapters' leaves as they were put on or read, by name.
    memo: what other parts find out or compile once for the model, by the name of what it is.
    """

    model: Any
    tokenizer: Any
    head: Head
    lora: LoRA | None
    shares_prefix: bool
    source: str
    needs_caches: bool = False
    start: dict[str, mx.array] | None = field(default=None, compare=False, repr=False)
    memo: dict[str, Any] = field(default_factory=dict[str, Any], compare=False, repr=False)
    initial: Mapping[str, mx.array] = field(default_factory=dict[str, mx.array], compare=False, repr=False)

    def __repr__(self) -> str:
        adapters = "frozen" if self.lora is None else f"rank {self.lora.rank}, {self.trainable_parameters:,} trainable"
        return f"Policy({self.source or type(self.model).__module__}, {adapters})"

    @property
    def adapted(self) -> list[Adapted]:
        """The table of adapted layers."""
        return adapted(self.model)

    @property
    def trainable_parameters(self) -> int:
        """Numbers that the optimizer moves."""
        return sum(line.parameters for line in self.adapted)

    @property
    def distance(self) -> float:
        """How far the adapters are from where they began: the Euclidean norm of all differences, in float32."""
        now = dict(leaves(self.model.trainable_parameters()))
        gaps = [(now[name].astype(mx.float32) - array.astype(mx.float32)) for name, array in self.initial.items()]
        total = mx.stack([mx.square(gap).sum() for gap in gaps]).sum() if gaps else mx.zeros(())
        return float(cast(float, mx.sqrt(total).item()))

    def require_trainable(self, where: str) -> None:
        """ModelError where the optimizer has nothing to move."""
        if not leaves(self.model.trainable_parameters()):
            raise ModelError(where, "this policy was loaded without adapters, wanted one with lora=LoRA(...)")

    def require_ids(self, what: str, ids: Any) -> None:
        """TokenError for a token id that the model does not have, which would be read from behind its arrays.

        ids: a sequence or an array of any shape.
        """
        numbers = np.asarray(ids).reshape(-1)
        strange = numbers[(numbers < 0) | (numbers >= self.head.vocabulary)]
        if strange.size:
            last = self.head.vocabulary - 1
            raise TokenError(what, f"wanted token ids that the model has, 0 to {last}, got {strange[0]}")

    def save(self, folder: str | Path) -> None:
        """Save the adapter in mlx-lm's format: `mlx_lm.generate --adapter-path FOLDER` and `mlx_lm.fuse` read it."""
        if self.lora is None:
            raise ModelError(str(folder), "this policy was loaded without adapters, there is nothing to save")
        adapter_folder.save(self.model, self.lora, folder, self.source)


def as_policy(model: nn.Module, tokenizer: Any, *, lora: LoRA | None, source: str = "", seed: int = 0) -> Policy:
    """Make a policy of an mlx-lm model that is already in memory; adapters are put on it in place."""
    check_weights(model, source)
    try:
        model.freeze()
        if lora is not None:
            lora = adapt(model, lora, seed)
    except AttributeError as error:  # of a class of mlx-lm's that is not whole
        raise ModelError(type(model).__module__, f"cannot be trained: {one_line(error)}") from error
    model.eval()
    head, sharing = split(model), shares_prefix(model)  # the head first: it says what a forward pass fails of
    caches, initial = sharing and needs_caches(model), dict(leaves(model.trainable_parameters()))
    return Policy(model, tokenizer, head, lora, sharing, source, caches, initial=initial)


@keywords
def load(
    id: str,
    *,
    lora: LoRA | None = LoRA(),
    dtype: settings.Dtype | None = None,
    adapter: str | Path | None = None,
    reference: settings.Reference | None = None,
    seed: int = 0,
) -> Policy:
    """Load a Hugging Face id, an mlx-lm folder or a llama `.gguf` file, and put LoRA adapters on it.

    Args:
        lora: the adapters; None leaves the model frozen, for a reference or a teacher.
        dtype: of the weights; None keeps that of the files. A `.gguf` file is dequantised to it.
        adapter: a folder that a run, mlx-lm or PEFT has saved, or `sha256:DIGEST` of the store, whose weights and
            settings are taken over in place of `lora`.
        reference: what divergences are from: the "start", which is the model with the adapter as it was loaded, or the
            "base" model without one; None is the start.
        seed: of the adapters' initial values.
    Raises:
        UserError: the model cannot be had, or a key of `lora` matches nothing.
    """
    checked = settings.Model(id=id, dtype=dtype, reference=reference)
    seed = checked_value("load", "seed", Seed, seed)
    saved = None if adapter is None else adapter_folder.read(adapter)
    lora = lora if saved is None else adapter_folder.taken_over(lora, saved)
    model, tokenizer = _read(checked.id, None if checked.dtype is None else getattr(mx, checked.dtype))
    loaded = as_policy(model, tokenizer, lora=lora, source=id, seed=seed)
    _require_tokens(loaded)
    if saved is None:
        return loaded
    adapter_folder.warn_of_other_model(saved, id)
    adapter_folder.fill(model, saved)
    initial = dict(leaves(model.trainable_parameters()))
    return replace(loaded, start=None if reference == "base" else dict(saved.weights), initial=initial)


def _require_tokens(policy: Policy) -> None:
    """TokenError for tokens that any text may be made of, or that end one, and that the model does not have.

    Special tokens besides are refused where a prompt has them: Gemma's tokenizers have some that a model is without.
    """
    tokenizer, place = policy.tokenizer, f"model: id: {policy.source}"
    special = tokenizer.get_added_vocab()
    own = sorted(number for token, number in tokenizer.get_vocab().items() if token not in special)
    policy.require_ids(f"{place}: its tokenizer", own)
    policy.require_ids(f"{place}: eos_token_id", sorted(tokenizer.eos_token_ids))


def _read(id: str, dtype: mx.Dtype | None) -> tuple[Any, Any]:
    path = expanded(id)
    if id.endswith(".gguf"):
        from mlxrl.policy import gguf

        if not path.is_file():
            raise ModelError("model", "id", f"no file {id}")
        return gguf.read(path, dtype)[:2]
    model, tokenizer, _ = load_mlx_lm(id, path)
    if dtype is not None:
        model.set_dtype(dtype)
        mx.eval(model.parameters())
    return model, tokenizer


def load_mlx_lm(id: str, path: Path, lazy: bool = False) -> tuple[Any, Any, dict[str, Any]]:
    """A model, its tokenizer and its config; lazy: without the weights in memory.

    Raises:
        ModelError: there is none, or its files cannot be read.
    """
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError("model", "id", f"{id} has no config.json; wanted an mlx-lm model folder")
    if not path.exists() and (path.is_absolute() or id.startswith(".") or id.count("/") != 1):
        raise ModelError("model", "id", f"no folder {id}; wanted a Hugging Face id, a model folder or a .gguf file")
    require_open_files()
    import mlx_lm
    from mlx_lm.utils import _download  # pyright: ignore

    try:
        folder = _download(str(path) if path.exists() else id)
        check_folder(folder)
        safe = {"trust_remote_code": False}  # left out, transformers asks on a terminal
        loaded: Any = mlx_lm.load(str(folder), tokenizer_config=safe, lazy=lazy, return_config=True)
        rows = getattr(getattr(loaded[0], "args", None), "vocab_size", None)
        if fault := tokenizer_fault(loaded[1], rows):
            raise ModelError(fault)
        getattr(loaded[1], "deprecation_warnings", {})[TOO_LONG] = True  # which we say ourselves
    except ModelError as error:
        raise error.within("model", "id", f"{id} could not be loaded") from None
    except (Exception, SystemExit) as error:  # the files may hold anything, and what reads them raises anything
        line = exception_line(error)
        line = "it wants Python of its folder to be run, which is never done" if REMOTE in line else line
        line = "mlx-lm gave up, and says above what it wants" if isinstance(error, SystemExit) else line
        raise ModelError("model", "id", f"{id} could not be loaded: {one_line(line, 300)}") from error
    return loaded


def folder_of(id: str, revision: str | None = None) -> Path | None:
    """The folder of a model that is on this machine, also of an id that was fetched before; None where it is not.

    revision: of a Hugging Face id; None for the one that was fetched last.
    """
    path = expanded(id)
    if path.exists() or id.count("/") != 1:
        return path if path.is_dir() else None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(id, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def built(config: Mapping[str, Any]) -> Any:
    """The model of an mlx-lm config, of which nothing is evaluated; layers are packed that its `quantization` names."""
    from mlx_lm.utils import _get_classes  # pyright: ignore

    model_class, arguments = _get_classes(dict(config))
    model = model_class(arguments.from_dict(dict(config)))
    if layers := config.get("quantization"):
        nn.quantize(model, class_predicate=lambda name, _: layers.get(name, False))
    return model
