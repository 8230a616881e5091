"""Names that other frameworks have for keys of the recipe, so that a message about an unknown key can point to ours."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

_LR = ("train.rl.optimizer.lr", "train.sft.optimizer.lr")
_BATCH = ("train.rl.prompts_per_step", "train.sft.batch_size")
_CLIP_GRAD = ("train.rl.optimizer.clip_grad", "train.sft.optimizer.clip_grad")
_WARMUP = ("train.rl.optimizer.warmup_steps", "train.sft.optimizer.warmup_steps")
_STEPS = ("train.rl.steps", "train.sft.steps")
_TP = ("train.parallel.tp", "rollout.tp", "logprob.parallel.tp")

KEYS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr", "learning_rate", "actor_lr", "actor_learning_rate"), _LR),
    **dict.fromkeys(("batch_size", "train_batch_size", "rollout_batch_size", "global_batch_size", "num_prompts", "gen_batch_size"), _BATCH),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping", "clip_grad_norm", "grad_norm_clip"), _CLIP_GRAD),
    **dict.fromkeys(("warmup", "lr_warmup_steps", "num_warmup_steps", "warmup_ratio"), _WARMUP),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps", "total_training_steps", "num_rollout"), _STEPS),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "total_epochs"), _STEPS),
    **dict.fromkeys(
        ("n", "n_samples", "num_samples", "num_generations", "n_samples_per_prompt", "samples_per_prompt", "rollout_n", "group_n"),
        ("train.rl.group_size",),
    ),
    **dict.fromkeys(("ppo_epochs", "num_minibatches", "mini_batch_size", "ppo_mini_batch_size"), ("train.rl.minibatches",)),
    **dict.fromkeys(
        (
            "micro_batch_size",
            "per_device_train_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "max_tokens_per_gpu",
            "ppo_max_token_len_per_gpu",
        ),
        ("train.tokens_per_microbatch",),
    ),
    **dict.fromkeys(("kl_beta", "beta", "kl_coeff", "kl_loss_coef", "kl_penalty", "init_kl_coef"), ("train.rl.kl_coef",)),
    **dict.fromkeys(("entropy_coeff", "ent_coef", "entropy_bonus"), ("train.rl.entropy_coef",)),
    **dict.fromkeys(("clip_range", "cliprange", "clip_ratio", "clip_ratio_low", "epsilon", "eps_clip", "clip_eps"), ("train.rl.clip_low",)),
    **dict.fromkeys(("clip_ratio_high", "epsilon_high", "eps_clip_high"), ("train.rl.clip_high",)),
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), ("train.rl.advantage",)),
    **dict.fromkeys(("algorithm", "algo"), ("train.rl.preset",)),
    **dict.fromkeys(("loss_agg_mode", "loss_type"), ("train.rl.aggregate",)),
    **dict.fromkeys(
        ("max_new_tokens", "max_response_length", "max_completion_length", "response_length", "generate_max_len"), ("rollout.max_tokens",)
    ),
    **dict.fromkeys(("max_model_len", "max_seq_len", "max_length", "context_length", "max_position_embeddings"), ("rollout.context",)),
    **dict.fromkeys(("tensor_parallel_size", "tensor_model_parallel_size", "tp_size"), _TP),
    **dict.fromkeys(("pipeline_parallel_size", "pipeline_model_parallel_size", "pp_size"), ("train.parallel.pp", "logprob.parallel.pp")),
    **dict.fromkeys(("context_parallel_size", "cp_size"), ("train.parallel.cp",)),
    **dict.fromkeys(("expert_parallel_size", "expert_model_parallel_size", "ep_size"), ("train.parallel.ep",)),
    **dict.fromkeys(("data_parallel_size", "dp_size"), ("train.parallel.dp",)),
    **dict.fromkeys(("gpu_memory_utilization", "mem_fraction_static"), ("rollout.gpu_memory",)),
    **dict.fromkeys(("max_num_seqs", "max_running_requests"), ("rollout.max_in_flight",)),
    **dict.fromkeys(("num_speculative_tokens", "speculative_num_steps", "draft_tokens"), ("rollout.speculation.num_tokens",)),
    **dict.fromkeys(("num_engines", "num_rollout_engines", "vllm_num_engines"), ("rollout.replicas",)),
    "stop_token_ids": ("rollout.stop_ids",),
    "eos_token_id": ("rollout.end_ids",),
    "eos_token_ids": ("rollout.end_ids",),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing", "recompute_granularity"), ("train.recompute",)),
    **dict.fromkeys(("bf16", "fp16", "mixed_precision"), ("train.precision",)),
    **dict.fromkeys(("lora_rank", "lora_r"), ("train.lora.rank",)),
    "lora_alpha": ("train.lora.alpha",),
    **dict.fromkeys(("target_modules", "lora_target_modules"), ("train.lora.targets",)),
    **dict.fromkeys(("model_path", "model_name", "model_name_or_path", "pretrain", "hf_checkpoint"), ("model.path",)),
    **dict.fromkeys(("dataset", "dataset_name", "train_files", "train_data", "prompt_data"), ("data.path",)),
    **dict.fromkeys(("val_files", "eval_data", "test_files", "eval_dataset"), ("data.eval_path",)),
    **dict.fromkeys(("reward_fn", "reward_func", "reward_funcs", "reward_function", "rm_type", "custom_rm_path"), ("reward.function",)),
    **dict.fromkeys(("test_freq", "eval_freq", "eval_interval", "eval_steps"), ("train.eval_every",)),
    **dict.fromkeys(("save_freq", "save_interval", "save_steps"), ("train.checkpoint_every",)),
    **dict.fromkeys(("save_total_limit", "max_ckpt_to_keep", "max_actor_ckpt_to_keep"), ("train.keep_checkpoints",)),
    **dict.fromkeys(("output_dir", "save_dir", "default_local_dir"), ("run_dir",)),
    **dict.fromkeys(("experiment_name", "run_name", "exp_name"), ("name",)),
    **dict.fromkeys(("project_name", "wandb_project"), ("telemetry.wandb",)),
    **dict.fromkeys(("n_gpus_per_node", "num_gpus_per_node"), ("cluster.gpus_per_node",)),
}
"""By a name elsewhere, the keys here that mean it, the most usual one first."""


def ours(path: tuple[str, ...]) -> str | None:
    """The key here for a name of another framework; of several, the one that has most of the path in common, or else the first."""
    keys = KEYS.get(path[-1].lower(), ())
    return max(keys, key=lambda key: _shared(tuple(key.split(".")), path), default=None)


def _shared(key: tuple[str, ...], path: tuple[str, ...]) -> int:
    """How many steps the two have in common from the top."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(key, path, strict=False))))
