"""Families of mlx-lm, each tiny and random, windows of a few tokens included.

`python tests/families.py` prints the table of how they are batched.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models as models_of_mlx_lm

from models import ready

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "num_hidden_layers": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1,
    "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
SLIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**LINEAR, **EXPERTS, "partial_rotary_factor": 0.5},
    "qwen3_5": {"text_config": {**SIZES, **LINEAR}},
    "qwen3_5_moe": {"text_config": {**SIZES, **LINEAR, **EXPERTS}},
    "gemma2": {},
    "gemma3_text": {"sliding_window": 6, "sliding_window_pattern": 2},
    "gemma4_text": {
        **SLIDES, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "global_head_dim": 16,
        "hidden_size_per_layer_input": 0, "layer_types": SLIDES["layer_types"] * 2,
    },
    "gemma3n": {"text_config": {
        **SIZES, **SLIDES, "model_type": "gemma3n_text", "num_hidden_layers": 6, "num_kv_shared_layers": 2,
        "layer_types": SLIDES["layer_types"] * 3, "vocab_size_per_layer_input": 300, "rope_local_base_freq": 1e4,
        "final_logit_softcapping": 30.0, "activation_sparsity_pattern": [0.5] + [0.0] * 5, "laurel_rank": 8,
        "hidden_size_per_layer_input": 16, "altup_num_inputs": 4, "altup_coef_clip": 120.0,
        "altup_correct_scale": True, "altup_active_idx": 0,
    }},
    "gpt_oss": {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral3": {**SLIDES, "rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
                   "original_max_position_embeddings": 8}},
    "phi3": {},
    "olmo3": SLIDES,
    "smollm3": {"no_rope_layer_interval": 2},
    "cohere2": {"sliding_window": 6, "sliding_window_pattern": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "qk_nope_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    },
    "kimi_linear": {
        **EXPERTS, "num_hidden_layers": 4, "model_max_length": 512, "num_experts_per_token": 2, "num_shared_experts": 1,
        "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "mla_use_nope": True,
        "first_k_dense_replace": 1, "linear_attn_config": {
            "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4,  # noqa: E501
        },
    },
    "lfm2": {
        "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 64, "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "block_ff_dim": 128, "full_attn_idxs": [1],
    },
    "granitemoehybrid": {
        **MAMBA, "attention_bias": False, "embedding_multiplier": 2.0, "attention_multiplier": 0.25,
        "logits_scaling": 2.0, "residual_multiplier": 0.5, "layer_types": ["mamba", "attention"],
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128, "key_multiplier": 1.0, "lm_head_multiplier": 1.0},
    "nemotron_h": {
        "attention_bias": False, "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_proj_bias": False,
        "ssm_state_size": 16, "conv_kernel": 4, "n_groups": 1, "mlp_bias": False, "layer_norm_epsilon": 1e-5,
        "use_bias": False, "use_conv_bias": True, "hybrid_override_pattern": list("M-*-"), "num_hidden_layers": 4,
    },
    "mamba2": {
        "num_heads": 8, "state_size": 16, "layer_norm_epsilon": 1e-5, "conv_kernel": 4, "n_groups": 1,
        "use_bias": False, "use_conv_bias": True, "time_step_limit": (0.0, 100.0), "time_step_rank": "auto",
    },
    "rwkv7": {
        "norm_eps": 1e-5, "head_dim": 16, "a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "gpt2": {"n_ctx": 512, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "layer_norm_epsilon": 1e-5},
    "llama4": {"text_config": {
        **SIZES, "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8, "interleave_moe_layer_step": 2,  # noqa: E501
        "intermediate_size_mlp": 128, "num_experts_per_tok": 1, "num_local_experts": 2, "rope_scaling": None,
        "use_qk_norm": True, "num_hidden_layers": 4,
    }},
}  # fmt: skip


def family(name: str, seed: int = 0) -> Any:
    """A random model of a family."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    settings = {"model_type": name, **SIZES, **FAMILIES[name]}
    return ready(module.Model(module.ModelArgs.from_dict(settings)))


def table(modes: dict[str, str]) -> str:
    """A Markdown table of how families are batched, for benchmarks/README.md."""
    words = {
        "ragged": "batched", "uniform": "batched; prompts of one length at a time",
        "equal_length": "fallback: equal lengths", "single": "fallback: one by one",
    }  # fmt: skip
    lines = ["| family of mlx-lm | rows |", "|---|---|"]
    lines += [f"| {name} | {words[mode]} |" for name, mode in sorted(modes.items())]
    rest = len(architectures() - set(modes))
    return "\n".join([*lines, f"| {rest} others | untested; checked when they are first used |"])


def architectures() -> set[str]:
    """Modules of mlx-lm that define a model."""
    folder = Path(models_of_mlx_lm.__path__[0])
    return {path.stem for path in folder.glob("*.py") if "class ModelArgs" in path.read_text(encoding="utf-8")}


if __name__ == "__main__":
    from mlxrl.policy.policy import as_policy
    from mlxrl.rollout.batching_mode import check
    from models import tokenizer

    warnings.simplefilter("ignore")
    print(table({name: check(as_policy(family(name), tokenizer(), lora=None)) for name in FAMILIES}))
