"""What TRL, verl and mlx-lm call things, in our words, for the messages about names that are unknown here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlxrl.errors import did_you_mean

_CLIP = "algorithm.clip = [below, above]"
_SAME: Mapping[str, tuple[str, ...]] = {
    "steps": (
        "iters", "max_steps", "num_steps", "total_training_steps", "num_train_epochs", "total_epochs", "epochs",
        "num_episodes",
    ),
    "model.id": ("model", "model_name", "model_name_or_path", "model_path", "hf_path", "pretrain"),
    "model.id, whose files may be packed": ("load_in_4bit", "load_in_8bit", "quantization_config", "q_bits"),
    "model.adapter": ("resume_adapter_file",),
    "model.dtype": ("torch_dtype", "bf16", "fp16"),
    "lora.rank": ("r", "lora_r", "lora_rank"),
    "lora.scale, which is alpha / rank": ("alpha", "lora_alpha"),
    "lora.dropout": ("lora_dropout",),
    "lora.keys": ("target_modules", "lora_target_modules", "modules"),
    "lora.layers": ("num_layers", "lora_layers", "layers_to_transform"),
    "lora.dora": ("use_dora", "fine_tune_type"),
    "[lora]": ("peft_config", "lora_parameters", "use_peft"),
    "data.train": ("data", "dataset", "dataset_name", "train_dataset", "train_files", "prompt_data"),
    "data.evaluation": ("eval_dataset", "val_files", "valid"),
    "data.prompt": ("prompt_key", "prompt_feature", "input_key"),
    "data.columns": ("label_key", "answer_key", "reward_fn_key"),
    "data.system": ("system_prompt",),
    "reward.functions": (
        "reward_funcs", "reward_func", "reward_functions", "reward_fn",
        "custom_reward_function", "reward_manager", "remote_rm_url",
    ),
    "reward.overlong_buffer": ("overlong_buffer_cfg", "overlong_buffer_len"),
    "reward.overlong_factor": ("overlong_penalty_factor",),
    "reward.weights": ("reward_weights",),
    "sampling.max_tokens": (
        "max_completion_length", "max_response_length", "max_new_tokens", "response_length",
        "generate_max_len",
    ),
    "sampling.temperature": ("temp", "do_sample"),
    "sampling.stop_strings": ("stop", "stop_words"),
    "sampling.thinking": ("enable_thinking", "chat_template_kwargs", "apply_chat_template_kwargs"),
    "the table [sampling]": ("generation_kwargs", "sampling_params"),
    "rollout.group_size": ("num_generations", "n", "rollout_n", "num_samples", "n_samples_per_prompt"),
    "rollout.tasks_per_step": (
        "per_device_train_batch_size", "train_batch_size", "batch_size", "generation_batch_size", "prompts_per_step",
        "gen_batch_size", "rollout_batch_size",
    ),
    "rollout.max_rows": ("per_device_eval_batch_size", "max_num_seqs"),
    "rollout.resampling_rounds": ("filter_groups", "max_num_gen_batches", "dynamic_sampling"),
    "environment.max_turns": ("max_tool_calling_iterations", "max_assistant_turns", "max_user_turns"),
    "environment.factory": ("environment_factory", "tools", "tool_config_path", "agent_loop_config_path"),
    "algorithm.name": ("adv_estimator", "advantage_estimator", "loss_mode"),
    "algorithm.kl.coefficient": ("beta", "kl_coef", "kl_loss_coef", "use_kl_loss", "kl_beta", "init_kl_coef"),
    "algorithm.kl.estimator": ("kl_loss_type", "kl_penalty", "kl_estimator"),
    "algorithm.kl.weighted": ("use_bias_correction_kl", "use_unbiased_kl"),
    "algorithm.kl_reward.coefficient": ("use_kl_in_reward",),
    "algorithm.entropy.coefficient": ("entropy_coeff", "entropy_coef"),
    _CLIP: (
        "epsilon", "epsilon_low", "epsilon_high", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "cliprange",
        "eps_clip", "eps_clip_low", "eps_clip_high", "eps_clip_low_high",
    ),
    "algorithm.dual_clip": ("clip_ratio_c",),
    "algorithm.scale": ("scale_rewards", "norm_adv_by_std_in_grpo"),
    "algorithm.scale = 'function'": ("multi_objective_aggregation",),
    "algorithm.tau_pos": ("sapo_temperature_pos",),
    "algorithm.tau_neg": ("sapo_temperature_neg",),
    "algorithm.reduction": ("loss_type", "loss_agg_mode"),
    "algorithm.mask_truncated": ("mask_truncated_completions",),
    "algorithm.name = 'gspo'": ("importance_sampling_level",),
    "algorithm.correction.mode": (
        "vllm_importance_sampling_mode", "vllm_importance_sampling_correction", "vllm_is_correction_type",
        "enable_vllm_is_correction", "use_tis", "rollout_rs",
    ),
    "algorithm.correction.level": ("rollout_is",),
    "algorithm.correction.bounds": (
        "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
        "vllm_is_truncated_threshold", "rollout_is_threshold", "tis_imp_ratio_cap", "tis_clip",
    ),
    "algorithm.veto.threshold": ("rollout_token_veto_threshold",),
    "algorithm.off_policy.delta": ("off_policy_mask_threshold", "opsm_delta"),
    "train.tokens_per_pass": (
        "gradient_accumulation_steps", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu",
        "ppo_max_token_len_per_gpu", "micro_batch_size",
        "grad_accumulation_steps", "use_dynamic_bsz", "micro_train_batch_size", "max_tokens_per_gpu",
    ),
    "train.max_tokens_per_sequence": ("max_seq_length", "max_prompt_length", "max_length", "prompt_length"),
    "train.recompute": ("grad_checkpoint", "gradient_checkpointing", "enable_gradient_checkpointing"),
    "train.updates_per_rollout": ("num_iterations", "ppo_epochs"),
    "train.minibatches": ("ppo_mini_batch_size", "num_mini_batches", "steps_per_generation"),
    "optimizer.name": ("optim", "optimizer_name"),
    "optimizer.learning_rate": ("lr", "actor_learning_rate"),
    "optimizer.schedule": ("lr_scheduler_type", "lr_schedule", "lr_scheduler", "warmup_style"),
    "optimizer.warmup_steps": (
        "warmup", "warmup_ratio", "lr_warmup_steps", "num_warmup_steps",
        "lr_warmup_steps_ratio", "lr_warmup_ratio",
    ),
    "optimizer.betas": ("adam_beta1", "adam_beta2", "adam_betas"),
    "optimizer.max_grad_norm": ("grad_clip", "clip_grad", "grad_clip_norm", "max_norm"),
    "the table [evaluation]": ("val_kwargs",),
    "evaluation.examples": ("val_batches", "test_batches"),
    "run.folder": (
        "output_dir", "default_local_dir", "save_dir", "save_path", "project_name", "experiment_name", "run_name",
    ),
    "run.checkpoint_every": ("save_steps", "save_every", "save_freq", "save_strategy"),
    "run.evaluate_every": ("eval_steps", "steps_per_eval", "test_freq", "eval_strategy", "evaluation_strategy"),
    "run.keep": ("load_best_model_at_end",),
    "run.patience": ("early_stopping_patience",),
    "run.samples_every": ("log_completions", "num_completions_to_print", "log_val_generations"),
    "run.sinks": ("report_to", "logger", "callbacks", "use_wandb"),
    "memory.cache_limit": ("clear_cache_threshold",),
    "memory.limit": ("gpu_memory_utilization", "vllm_gpu_memory_utilization"),
    "`mlxrl train --resume RUN`, and `resume` in Python": ("resume_from_checkpoint", "resume_from_path", "resume_mode"),
    "the folder run.folder/adapters, which `mlxrl eval --adapter DIR` reads": ("adapter_path", "adapter_file"),
}  # fmt: skip
FOREIGN = {name: ours for ours, names in _SAME.items() for name in names}
"""Names of other libraries, with what stands for them here."""
_COLUMNS = (
    ("answer", "solution", "label", "target", "ground_truth", "gold", "final_answer", "expected_answer", "reference"),
    ("prompt", "question", "problem", "instruction", "query", "input", "messages"),
)
"""Columns that mean the same in data sets."""


def foreign(name: str) -> str:
    """ "; here it is x" for another library's name, also as an option of a command line, else nothing."""
    ours = FOREIGN.get(name.lstrip("-").replace("-", "_").lower())
    return f"; here it is {ours}" if ours else ""


def same_column(name: str, columns: Iterable[str]) -> str | None:
    """The column that a missing one may be called, None where there is none."""
    columns, alike = list(columns), next((names for names in _COLUMNS if name in names), ())
    return next((one for one in alike if one in columns), None)


def renamed_column(name: str, columns: Iterable[str]) -> str:
    """How a column gets the name that is wanted, for the end of a message."""
    other = same_column(name, columns := list(columns))
    return f'; data.columns = {{{name} = "{other}"}} renames it' if other else did_you_mean(name, columns)
