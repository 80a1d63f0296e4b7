"""What TRL, verl and mlx-lm call things, in our words, for the messages about names that are unknown here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlxrl.errors import did_you_mean

_CLIP = "algorithm.clip = [below, above]"
_SAME: Mapping[str, tuple[str, ...]] = {
    "steps": ("iters", "max_steps", "num_steps", "total_training_steps", "num_train_epochs", "total_epochs", "epochs"),
    "model.id": ("model", "model_name", "model_name_or_path", "model_path", "hf_path"),
    "model.dtype": ("torch_dtype", "bf16", "fp16"),
    "lora.rank": ("r", "lora_r", "lora_rank"),
    "lora.scale, which is alpha / rank": ("alpha", "lora_alpha"),
    "lora.dropout": ("lora_dropout",),
    "lora.keys": ("target_modules", "lora_target_modules", "modules"),
    "[lora]": ("peft_config", "lora_parameters", "use_peft"),
    "data.train": ("data", "dataset", "dataset_name", "train_dataset", "train_files"),
    "data.evaluation": ("eval_dataset", "val_files", "valid"),
    "data.prompt": ("prompt_key", "prompt_feature"),
    "data.system": ("system_prompt",),
    "reward.functions": ("reward_funcs", "reward_func", "reward_functions", "reward_fn"),
    "reward.weights": ("reward_weights",),
    "sampling.max_tokens": ("max_completion_length", "max_response_length", "max_new_tokens", "response_length"),
    "sampling.temperature": ("temp",),
    "sampling.stop_strings": ("stop", "stop_words"),
    "sampling.thinking": ("enable_thinking",),
    "rollout.group_size": ("num_generations", "n", "rollout_n", "num_samples"),
    "rollout.tasks_per_step": (
        "per_device_train_batch_size", "train_batch_size", "batch_size", "generation_batch_size", "prompts_per_step",
    ),
    "rollout.max_rows": ("per_device_eval_batch_size", "max_num_seqs"),
    "rollout.resampling_rounds": ("filter_groups", "max_num_gen_batches", "dynamic_sampling"),
    "environment.max_turns": ("max_tool_calling_iterations", "max_assistant_turns"),
    "algorithm.name": ("adv_estimator", "advantage_estimator"),
    "algorithm.kl.coefficient": ("beta", "kl_coef", "kl_loss_coef", "use_kl_loss", "kl_beta", "init_kl_coef"),
    "algorithm.entropy.coefficient": ("entropy_coeff", "entropy_coef"),
    _CLIP: ("epsilon", "epsilon_low", "epsilon_high", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "cliprange"),
    "algorithm.dual_clip": ("clip_ratio_c",),
    "algorithm.scale": ("scale_rewards", "norm_adv_by_std_in_grpo"),
    "algorithm.reduction": ("loss_type", "loss_agg_mode"),
    "algorithm.mask_truncated": ("mask_truncated_completions",),
    "algorithm.name = 'gspo'": ("importance_sampling_level",),
    "train.tokens_per_pass": (
        "gradient_accumulation_steps", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu",
        "ppo_max_token_len_per_gpu", "micro_batch_size",
    ),
    "train.max_tokens_per_sequence": ("max_seq_length", "max_prompt_length", "max_length"),
    "train.recompute": ("grad_checkpoint", "gradient_checkpointing", "enable_gradient_checkpointing"),
    "train.updates_per_rollout": ("num_iterations", "ppo_epochs"),
    "train.minibatches": ("ppo_mini_batch_size", "num_mini_batches"),
    "optimizer.name": ("optim",),
    "optimizer.learning_rate": ("lr",),
    "optimizer.schedule": ("lr_scheduler_type", "lr_schedule", "lr_scheduler"),
    "optimizer.warmup_steps": ("warmup", "warmup_ratio", "lr_warmup_steps", "num_warmup_steps"),
    "optimizer.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.max_grad_norm": ("grad_clip", "clip_grad", "grad_clip_norm"),
    "evaluation.examples": ("val_batches", "test_batches"),
    "run.folder": ("output_dir", "default_local_dir", "save_dir"),
    "run.checkpoint_every": ("save_steps", "save_every", "save_freq"),
    "run.evaluate_every": ("eval_steps", "steps_per_eval", "test_freq"),
    "run.keep": ("load_best_model_at_end",),
    "run.patience": ("early_stopping_patience",),
    "run.samples_every": ("log_completions", "num_completions_to_print"),
    "run.sinks": ("report_to", "logger", "callbacks"),
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
