"""Families of mlx-lm, each tiny and random, windows of a few tokens included.

`python tests/families.py` prints the table of how they are batched.
"""

from __future__ import annotations

import dataclasses
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
    "minimax": {**EXPERTS, "num_local_experts": 4, "rotary_dim": 8, "shared_intermediate_size": 32},
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
OTHERS = [
    "Klear", "afmoe", "apertus", "bailing_hybrid", "bailing_moe", "bailing_moe_linear", "bailing_moe_v3", "bitnet",
    "cohere", "deepseek", "deepseek_v32", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone_moe", "gear",
    "gemma", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_bigcode", "gpt_neox", "gptj", "granite",
    "granitemoe", "helium", "hunyuan_v1_dense", "internlm2", "internlm3", "iquestloopcoder", "jamba", "laguna",
    "lfm2_moe", "lille-130m", "llama4_text", "longcat_flash", "longcat_flash_ngram", "mamba", "mimo", "minicpm",
    "mistral3", "mixtral", "muse_glimmer", "nanbeige", "nanochat", "nemotron", "olmo2", "olmoe", "openelm",
    "phi", "phimoe", "pixtral", "plamo2", "plamo3", "qwen2_moe", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe",
    "seed_oss", "solar_open", "starcoder2", "talkie", "telechat3", "youtu_llm",
]  # fmt: skip
"""Families of which a tiny model is built with those of these settings that they have."""
USUAL: dict[str, Any] = {
    **EXPERTS, **SLIDES,
    # sizes, under the names of each
    **dict.fromkeys(("n_layers", "n_layer", "num_layers", "num_transformer_layers"), 2),
    **dict.fromkeys(("n_heads", "n_head", "num_local_experts", "moe_num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_kv_heads", "n_kv_head", "moe_k", "moe_topk", "index_n_heads", "num_gqa_groups"), 2),
    **dict.fromkeys(("d_model", "n_embd", "model_dim", "index_topk"), 64),
    **dict.fromkeys(("hidden_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp"), 128),
    **dict.fromkeys(("n_positions", "n_ctx", "block_size", "max_seq_len", "rope_max_length"), 512),
    **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "norm_eps"), 1e-5),
    **dict.fromkeys(("rope_local_base_freq", "rotary_emb_base", "rope_freq_constant"), 1e4),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rope_pct"), 0.5),
    **dict.fromkeys(("attention_bias", "mlp_bias", "bias", "use_bias", "conv_bias"), False),
    **dict.fromkeys(("use_qk_norm", "qk_norm", "use_conv_bias", "post_norm", "use_expert_bias"), True),
    **dict.fromkeys(("share_input_output_layers", "normalize_qk_projections", "ffn_with_glu"), True),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "n_group", "topk_group", "moe_layer_freq"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_nope_head_dim", "head_size", "state_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size"), 32),
    "qk_rope_head_dim": 8, "rotary_dim": 8, "index_head_dim": 16, "rope_scaling": None, "sliding_window_pattern": 2,
    "logit_scale": 1.0, "logits_scaling": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 0.25, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_method": "noaux_tc",
    "conv_kernel": 4, "conv_L_cache": 3, "full_attn_idxs": [1], "hidden_act": "silu", "rope_type": "default",
    "dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 12, "attn_layer_period": 2, "attn_layer_offset": 1,
    "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    "layer_group_size": 2, "group_norm_size": 1, "is_moe_layer": [False, True], "no_rope_layers": [1, 0],
    "moe_layer_start_index": 0, "attn_type_list": [1, 0], "zero_expert_num": 1, "zero_expert_type": "identity",
    "attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "emb_neighbor_num": 2,
    "emb_split_num": 2, "ngram_vocab_size_ratio": 1.0, "ffn_multipliers": [1.0, 2.0], "ffn_dim_divisor": 16,
    "qkv_multipliers": [1.0, 1.0], "mamba_num_heads": 8, "num_query_heads": [4, 4], "num_kv_heads": [2, 2],
    "multi_query": True, "time_step_rank": "auto", "time_step_limit": (0.0, 100.0), "attention_window_size": 6,
}  # fmt: skip


ROPE = {"rope_theta": 1e4, "rope_type": "default"}
YARN = {
    "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
OF_TYPE = {"rope_parameters": dict.fromkeys(SLIDES["layer_types"], ROPE)}
BLOCK = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}
FURTHER: dict[str, dict[str, Any]] = {
    "afm7": {"hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "baichuan_m1": {"sliding_window_layers": [0], "conv_window": 2, "tie_word_embeddings": False},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "deepseek_v2": {"rope_scaling": YARN, "topk_method": "greedy", "num_key_value_heads": 4},
    "deepseek_v41": {"o_groups": 2, "o_lora_rank": 16, "compress_ratios": (0, 0), "scoring_func": "sqrtsoftplus"},
    "exaone4": {"sliding_window_pattern": "LG"},
    "gemma3": {"vocab_size": 320},
    "gemma4": {"vocab_size": 320, "text_config": FAMILIES["gemma4_text"]},
    "glm_moe_dsa": {"rope_parameters": ROPE, "num_key_value_heads": 4},
    "hunyuan": {
        "use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "kimi_k25": {"text_config": FAMILIES["deepseek_v3"]},
    "kimi_k3": {"text_config": {
        **FAMILIES["kimi_linear"], "hidden_act": "situ", "activation_situ_beta": 1.0, "attn_res_block_size": 2,
        "scoring_func": "sigmoid", "q_lora_rank": 16, "num_key_value_heads": 4,
    }},
    "kimi_vl": {"text_config": FAMILIES["deepseek_v3"]},
    "lfm2-vl": {"text_config": FAMILIES["lfm2"]},
    "mellum": OF_TYPE,
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1], "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False, "sliding_window_size": 6, "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1e4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "minicpm3": {
        "rope_scaling": {"original_max_position_embeddings": 512, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
        "num_key_value_heads": 4,
    },
    "minimax_m3_vl": {"text_config": {"moe_layer_freq": [0, 1], "layer_types": None}},
    "mistral4": {"rope_parameters": YARN, "num_key_value_heads": 4},
    "muse_spark": {"text_config": {
        "post_norm_eps": 1e-5, "rope_parameters": ROPE, "layer_rope_theta": [1e4, 0.0], "moe_hidden_size": 32,
        "final_logit_softcapping": 30.0, "output_multiplier": 1.0, "n_shared_experts": 0, "num_shared_experts": 0,
    }},
    "nemotron-nas": {"block_configs": [BLOCK, {**BLOCK, "attention": {"no_op": True}}]},
    "olmo_hybrid": {
        **LINEAR, "num_hidden_layers": 2, "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "phi3small": {
        "vocab_size": 100352, "dense_attention_every_n_layers": 2, "ff_intermediate_size": 128, "gegelu_limit": 20.0,
        "blocksparse_block_size": 32, "blocksparse_num_local_blocks": 2, "blocksparse_vert_stride": 2,
    },
    "phixtral": {"num_vocab": 320, "num_heads": 4},
    "plamo": {"n_shared_head": 2},
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5", "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "model.layers.1.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 0}],
        "text_config": {**FAMILIES["qwen3_5"]["text_config"], "num_experts": 0},
    },
    "qwen": {"kv_channels": 16},
    "recurrent_gemma": {
        "conv1d_width": 4, "logits_soft_cap": 30.0, "num_key_value_heads": 1, "block_types": ["recurrent", "attention"],
    },
    "spark2_5": {**OF_TYPE, "hidden_act": "gelu"},
    "stablelm": {"use_qkv_bias": True},
    "step3p5": {"num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2, "share_expert_dim": 32},
}  # fmt: skip
"""Families that want more than the usual settings."""
REFUSED = {
    "afm7": "afm7: cannot be trained: 'list' object has no attribute 'shape'",
    "bitnet": "lora: keys: wanted a linear layer in the last 2 blocks of mlx_lm.models.bitnet, found none",
    "deepseek_v41": "deepseek_v41: cannot be trained, because mlx-lm computes it without a gradient: ",
    "kimi_k3": "kimi_k3: a forward pass fails: AttributeError: 'LoRALinear' object has no attribute 'weight'",
    "phi3small": "phi3small: what mlx-lm computes for a token depends on later ones",
    "prism_hadamard_qwen35": "prism_hadamard_qwen35 has such layers: Can't convert layer of type Hadamard",
    "recurrent_gemma": "recurrent_gemma: cannot be trained: 'Model' object has no attribute '_no_grad'",
}
"""Those that are not trained, and why."""


def other(name: str) -> Any:
    """A random model of one of the OTHERS or of FURTHER."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    known, own = {field.name for field in dataclasses.fields(module.ModelArgs)}, FURTHER.get(name, {})
    settings = {"model_type": name, **SIZES, **{key: value for key, value in USUAL.items() if key in known}, **own}
    if "text_config" in known:
        text = {**SIZES, **USUAL, "model_type": name, **own.get("text_config", {})}
        settings = {"model_type": name, **own, "text_config": text}
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(settings))
    if name == "talkie":  # whose head begins as zeros
        model.lm_head = mx.random.normal(model.lm_head.shape)
    return ready(model)


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
