"""Tiny random models of further families."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import falcon_h1, gpt_oss, kimi_linear, mamba2, nemotron_h, qwen3_5, qwen3_5_moe, qwen3_next

from helpers import moved
from mlxrl.policy.policy import Policy, as_policy
from mlxrl.settings import LoRA
from models import moe, ready, tokenizer

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "head_dim": 16, "rms_norm_eps": 1e-6,
}  # fmt: skip


LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
}  # fmt: skip


EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip


def dense_hybrid() -> Any:
    text = {"model_type": "qwen3_5", **SIZES, **LINEAR, "tie_word_embeddings": True}
    return qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=text))


def hybrid_moe() -> Any:
    text = {"model_type": "qwen3_5_moe", **SIZES, **LINEAR, **EXPERTS, "tie_word_embeddings": False}
    return qwen3_5_moe.Model(qwen3_5_moe.ModelArgs(model_type="qwen3_5_moe", text_config=text))


def next_moe() -> Any:
    return qwen3_next.Model(qwen3_next.ModelArgs(
        model_type="qwen3_next", **SIZES, **LINEAR, **EXPERTS, mlp_only_layers=[], rope_theta=1e4,
        partial_rotary_factor=0.5, max_position_embeddings=512,
    ))  # fmt: skip


def kimi() -> Any:
    """Gates per key, and attention over latents."""
    layers = {"kda_layers": [1, 3], "full_attn_layers": [2, 4]}
    linear = {**layers, "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}
    return kimi_linear.Model(kimi_linear.ModelArgs(
        model_type="kimi_linear", **SIZES, rope_theta=1e4, linear_attn_config=linear, model_max_length=512,
        num_experts=4, num_experts_per_token=2, num_shared_experts=1, moe_intermediate_size=32, kv_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, mla_use_nope=True, first_k_dense_replace=1,
    ))  # fmt: skip


def windowed_moe() -> Any:
    """Attention sinks, and every other layer sees 6 tokens."""
    sizes = {name: value for name, value in SIZES.items() if name != "rms_norm_eps"}
    return gpt_oss.Model(gpt_oss.ModelArgs(
        **sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=6, rope_theta=10000,
    ))  # fmt: skip


def parallel_mamba() -> Any:
    return falcon_h1.Model(falcon_h1.ModelArgs(
        **{**SIZES, "rms_norm_eps": 1e-5}, mamba_d_head=16, mamba_d_ssm=64, mamba_d_state=16, mamba_n_heads=4,
        mamba_n_groups=1, rope_theta=1e4,
    ))  # fmt: skip


def pure_mamba() -> Any:
    return mamba2.Model(mamba2.ModelArgs(
        model_type="mamba2", num_heads=8, head_dim=16, vocab_size=320, hidden_size=64, intermediate_size=128,
        state_size=16, num_hidden_layers=2, layer_norm_epsilon=1e-5, conv_kernel=4, n_groups=1, use_bias=False,
        use_conv_bias=True, tie_word_embeddings=True, time_step_limit=(0.0, 100.0), time_step_rank="auto",
    ))  # fmt: skip


def mamba_hybrid() -> Any:
    return nemotron_h.Model(nemotron_h.ModelArgs(
        model_type="nemotron_h", vocab_size=320, hidden_size=64, intermediate_size=128, max_position_embeddings=512,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, attention_bias=False, mamba_num_heads=8,
        mamba_head_dim=16, mamba_proj_bias=False, ssm_state_size=16, conv_kernel=4, n_groups=1, mlp_bias=False,
        layer_norm_epsilon=1e-5, use_bias=False, use_conv_bias=True, hybrid_override_pattern=list("M-*-"),
        num_hidden_layers=4,
    ))  # fmt: skip


GATED = [dense_hybrid, hybrid_moe, next_moe, kimi]


EVERY = [*GATED, moe, windowed_moe, parallel_mamba, pure_mamba, mamba_hybrid]


def a_policy(make: Any, move: bool = True) -> Policy:
    mx.random.seed(0)
    p = as_policy(ready(make()), tokenizer(), lora=LoRA(rank=4))
    if move:
        moved(p.model)
    return p
