"""Tiny random models and a tokenizer made in memory."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3, qwen3_5, qwen3_moe
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% else %}<think>{% endif %}{% endif %}"
)
SPECIAL = ["<pad>", "<bos>", "<eos>", "<end>", "<user>", "<assistant>", "<system>", "<think>", "</think>"]


def dense(seed: int = 0, **changes: Any) -> qwen3.Model:
    mx.random.seed(seed)
    settings = {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
        "num_attention_heads": 4, "rms_norm_eps": 1e-6, "vocab_size": 320, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "head_dim": 16, "tie_word_embeddings": True,
    }  # fmt: skip
    return ready(qwen3.Model(qwen3.ModelArgs(**{**settings, **changes})))


def hybrid(layers: int = 4, seed: int = 0) -> qwen3_5.Model:
    mx.random.seed(seed)
    text = {
        "model_type": "qwen3_5", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16,
        "full_attention_interval": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    return ready(qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=text)))


def moe(seed: int = 0) -> qwen3_moe.Model:
    mx.random.seed(seed)
    settings = {
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
        "num_attention_heads": 4, "rms_norm_eps": 1e-6, "vocab_size": 320, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "head_dim": 16, "tie_word_embeddings": False,
        "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": 32, "norm_topk_prob": True,
    }  # fmt: skip
    return ready(qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(settings)))


def ready(model: Any) -> Any:
    model.eval()
    mx.eval(model.parameters())
    return model


def tokenizer(eos: tuple[str, ...] = ("<eos>",)) -> TokenizerWrapper:
    """A byte-level tokenizer: 9 special tokens, then the 256 bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *letters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>")
    fast.chat_template = TEMPLATE
    return TokenizerWrapper(fast, eos_token_ids=[vocabulary[token] for token in eos])
