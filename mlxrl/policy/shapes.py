"""The sizes of a model, read from its config alone.

Letters: D width of a hidden state, V vocabulary, F width inside a feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DENSE = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
EXPERTS = ("qwen3_moe", "qwen3_next", "qwen3_5_moe")
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
COVERED = tuple(dict.fromkeys((*DENSE, *EXPERTS, *HYBRID)))
QK_NORM = ("qwen3", "qwen3_moe", *HYBRID)
AGAIN = "fetch the model again"
LAYERS, LARGEST = 10_000, 10**9  # no model has more layers, or another size that is larger
SIZES = (
    "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "full_attention_interval",
    "decoder_sparse_step", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip
OPTIONAL = (
    "head_dim", "num_key_value_heads", "max_position_embeddings", "intermediate_size", "num_experts",
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
"""Sizes of a model, and those that may be 0 where it has no such part."""


class Uncovered(ValueError):
    """A model or setting that the estimate of memory does not cover, by name."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer of a block: its name in it, widths, and how many experts have one each (0: not of experts)."""

    name: str
    inputs: int
    outputs: int
    experts: int = 0

    @property
    def parameters(self) -> int:
        """Numbers of its weight."""
        return self.inputs * self.outputs * max(self.experts, 1)

    def adapter(self, rank: int) -> int:
        """Numbers of a LoRA adapter on it."""
        return rank * (self.inputs + self.outputs) * max(self.experts, 1)


@dataclass(frozen=True, slots=True)
class Attention:
    """heads and key_heads of `width` numbers each; normed: queries and keys are; gated: the output is, by its input."""

    heads: int
    key_heads: int
    width: int
    normed: bool = False
    gated: bool = False

    def linears(self, hidden: int) -> tuple[Linear, ...]:
        """Its projections."""
        queries, keys = self.heads * self.width, self.key_heads * self.width
        return (
            Linear("self_attn.q_proj", hidden, queries * (2 if self.gated else 1)),
            Linear("self_attn.k_proj", hidden, keys),
            Linear("self_attn.v_proj", hidden, keys),
            Linear("self_attn.o_proj", queries, hidden),
        )


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Linear attention: key and value heads and their widths; kernel: tokens that its convolution sees.

    joint: whether queries, keys, values and gate have one projection, as in qwen3_next.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    kernel: int
    joint: bool = False

    @property
    def keys(self) -> int:
        """Numbers of the keys of a token."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Numbers of the values of a token."""
        return self.value_heads * self.value_width

    @property
    def mixed(self) -> int:
        """Numbers of a token that go through the convolution."""
        return 2 * self.keys + self.values

    @property
    def state(self) -> int:
        """Numbers of a row's state."""
        return self.values * self.key_width

    def linears(self, hidden: int) -> tuple[Linear, ...]:
        """Its projections."""
        out = Linear("linear_attn.out_proj", self.values, hidden)
        if self.joint:
            mixed = Linear("linear_attn.in_proj_qkvz", hidden, self.mixed + self.values)
            return (mixed, Linear("linear_attn.in_proj_ba", hidden, 2 * self.value_heads), out)
        names = ("in_proj_qkv", self.mixed), ("in_proj_z", self.values), ("in_proj_b", self.value_heads)
        small = Linear("linear_attn.in_proj_a", hidden, self.value_heads)
        return (*(Linear(f"linear_attn.{name}", hidden, width) for name, width in names), small, out)


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated feed-forward layer of width F inside."""

    inside: int

    def linears(self, hidden: int, prefix: str = "mlp") -> tuple[Linear, ...]:
        """Its projections."""
        up = tuple(Linear(f"{prefix}.{name}", hidden, self.inside) for name in ("gate_proj", "up_proj"))
        return (*up, Linear(f"{prefix}.down_proj", self.inside, hidden))


@dataclass(frozen=True, slots=True)
class Experts:
    """`count` experts of width F inside, of which each token takes `chosen`; shared: the width of one that all take."""

    count: int
    chosen: int
    inside: int
    shared: int = 0

    def linears(self, hidden: int) -> tuple[Linear, ...]:
        """Its projections; routers are no part of them, as they are never adapted."""
        up = tuple(
            Linear(f"mlp.switch_mlp.{name}", hidden, self.inside, self.count) for name in ("gate_proj", "up_proj")
        )
        shared = Dense(self.shared).linears(hidden, "mlp.shared_expert") if self.shared else ()
        return (*up, Linear("mlp.switch_mlp.down_proj", self.inside, hidden, self.count), *shared)

    def routers(self, hidden: int) -> int:
        """Numbers of the routers."""
        return hidden * (self.count + (1 if self.shared else 0))


@dataclass(frozen=True, slots=True)
class Layer:
    """A block: what mixes tokens, and what follows."""

    mixer: Attention | GatedDelta
    inner: Dense | Experts

    def linears(self, hidden: int) -> tuple[Linear, ...]:
        """All its projections."""
        return (*self.mixer.linears(hidden), *self.inner.linears(hidden))

    def rest(self, hidden: int) -> int:
        """Numbers of its other parameters: norms, the convolution, the decay, routers."""
        mixer = self.mixer
        if isinstance(mixer, Attention):
            own = 2 * mixer.width if mixer.normed else 0
        else:
            own = mixer.mixed * mixer.kernel + 2 * mixer.value_heads + mixer.value_width
        return 2 * hidden + own + (self.inner.routers(hidden) if isinstance(self.inner, Experts) else 0)


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a kind that is covered. bits, group: of packed weights, 0 where they are not; context: tokens."""

    kind: str
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    tied: bool
    bits: int = 0
    group: int = 64
    context: int | None = None

    @property
    def linear_parameters(self) -> int:
        """Numbers in matrices, those of the vocabulary included."""
        blocks = sum(linear.parameters for layer in self.layers for linear in layer.linears(self.hidden))
        return blocks + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def other_parameters(self) -> int:
        """All other numbers."""
        return self.hidden + sum(layer.rest(self.hidden) for layer in self.layers)

    def weights(self, size: int) -> int:
        """Bytes of the weights in a dtype of `size` bytes, packed where they are."""
        if not self.bits:
            return size * (self.linear_parameters + self.other_parameters)
        packed = self.linear_parameters * self.bits // 8 + 2 * size * self.linear_parameters // self.group
        return packed + size * self.other_parameters

    def adapted(self, keys: tuple[str, ...] | None) -> list[Linear]:
        """The linear layers with adapters, one entry each; Uncovered for a key outside of the blocks."""
        every = [linear for layer in self.layers for linear in layer.linears(self.hidden)]
        if keys is None:
            return every
        if strange := next((key for key in keys if key not in {linear.name for linear in every}), None):
            raise Uncovered(f"lora.keys: {strange!r} is not a linear layer of this model's blocks")
        return [linear for linear in every if linear.name in keys]


def model_of(config: Mapping[str, Any], where: object = "config.json") -> Model:
    """The sizes that a config.json names. where: the file's name.

    Raises:
        Uncovered: the kind of model, its feed-forward layers or its packing are not covered.
        ValueError: a size is none that a model can have.
    """
    kind = str(config.get("model_type", ""))
    if kind not in COVERED:
        raise Uncovered(f"models of type {kind!r}; covered are {', '.join(COVERED)}")
    told = {**config, **_table(config, "text_config", where)}
    text = {name: value for name, value in told.items() if value is not None}
    _refuse_sizes(text, where)
    try:
        layers = tuple(Layer(_mixer(kind, text, i), _inner(kind, text, i)) for i in range(text["num_hidden_layers"]))
        bits, group = _packing(config, where)
        tied = bool(text.get("tie_word_embeddings", kind in ("llama", "smollm3")))
        context = text.get("max_position_embeddings")
        return Model(kind, text["hidden_size"], text["vocab_size"], layers, tied, bits, group, context)
    except KeyError as error:
        raise Uncovered(f"a config.json of type {kind!r} without {error.args[0]!r}") from None


def _refuse_sizes(text: Mapping[str, Any], where: object) -> None:
    """ValueError for what is there and is no size: a file that is cut short or was edited."""
    for name in SIZES:
        if name in text:
            _refuse_count(text[name], name, where, LAYERS if name == "num_hidden_layers" else LARGEST)
    for name in OPTIONAL:
        if text.get(name):
            _refuse_count(text[name], name, where)
    if text.get("num_attention_heads", 0) > text.get("hidden_size", LARGEST):
        _refuse_count(text["num_attention_heads"], "num_attention_heads", where, text["hidden_size"])
    if not isinstance(text.get("mlp_only_layers") or (), list | tuple):
        raise ValueError(f"{where}: mlp_only_layers: wanted a list, got {text['mlp_only_layers']!r}; {AGAIN}")


def _refuse_count(value: Any, name: str, where: object, most: int = LARGEST) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        wanted = f"wanted a whole number of at least 1 and at most {most:,}"
        raise ValueError(f"{where}: {name}: {wanted}, got {repr(value)[:60]}; {AGAIN}")


def _table(config: Mapping[str, Any], name: str, where: object) -> Mapping[str, Any]:
    value: Any = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {name}: wanted a table, got {repr(value)[:60]}; {AGAIN}")
    return value


def _mixer(kind: str, text: Mapping[str, Any], index: int) -> Attention | GatedDelta:
    if kind in HYBRID and (index + 1) % text.get("full_attention_interval", 4):
        return GatedDelta(
            text["linear_num_key_heads"],
            text["linear_num_value_heads"],
            text["linear_key_head_dim"],
            text["linear_value_head_dim"],
            text.get("linear_conv_kernel_dim", 4),
            joint=kind == "qwen3_next",
        )
    heads = text["num_attention_heads"]
    width = text.get("head_dim") or text["hidden_size"] // heads
    return Attention(heads, text.get("num_key_value_heads") or heads, width, kind in QK_NORM, kind in HYBRID)


def _inner(kind: str, text: Mapping[str, Any], index: int) -> Dense | Experts:
    sparse = kind in EXPERTS and text.get("num_experts") and index not in (text.get("mlp_only_layers") or ())
    if sparse and (index + 1) % text.get("decoder_sparse_step", 1) == 0:
        shared = text.get("shared_expert_intermediate_size") or 0 if kind in HYBRID else 0
        return Experts(text["num_experts"], text["num_experts_per_tok"], text["moe_intermediate_size"], shared)
    return Dense(text["intermediate_size"])


def _packing(config: Mapping[str, Any], where: object) -> tuple[int, int]:
    packed = _table(config, "quantization", where) or _table(config, "quantization_config", where)
    if not packed:
        return 0, 64
    if "bits" not in packed or "group_size" not in packed or packed.get("mode", "affine") != "affine":
        raise Uncovered(f"weights packed as {packed.get('mode') or packed.get('quant_method')!r}")
    for name in ("bits", "group_size"):
        _refuse_count(packed[name], f"quantization.{name}", where, 1024)
    return packed["bits"], packed["group_size"]
