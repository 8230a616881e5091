"""Run work A or B with verl on one GPU, or on two with `separate_async`.

    python3 benchmarks/peers/run_verl.py sums FOLDER --model MODEL --mode sync --updates 200
    python3 benchmarks/peers/run_verl.py tail FOLDER --mode colocate_async --updates 11
    python3 benchmarks/peers/run_verl.py tail FOLDER --mode separate_async --lend --updates 11
    python3 benchmarks/peers/run_verl.py sums FOLDER --model MODEL --cfg            # only compose the configuration

FOLDER is the output of prepare.py. Responses are logged to responses.jsonl in the working directory. This file is not named verl.py,
because that would hide the package.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from prepare import GROUP, MINIBATCHES, PROMPTS, RESPONSE

PROMPT_TOKENS = {"sums": 96, "fixed": 512, "tail": 512}
RATE = {"sums": 3e-5, "fixed": 1e-6, "tail": 1e-6}
WARMUP = {"sums": 20, "fixed": 0, "tail": 0}
"""Warm-up in optimizer steps; an update has `MINIBATCHES` of them."""


def separate(options: argparse.Namespace) -> list[str]:
    """Overrides of `separate_async`: one GPU trains, the other one generates. Weights are sent over NCCL, which needs cupy.

    verl requires that an update has `parameter_sync_step` mini-batches, after which it sends the weights. Its default is 4, which equals
    `MINIBATCHES`. The number of batches ahead (1) and the maximum age of a sample (8 versions) are verl's defaults. With --lend, an engine
    on the trainer's GPU also generates while the trainer would wait.
    """
    mode = "trainer.v1.separate_async"
    return [
        f"{mode}.parameter_sync_step={MINIBATCHES}",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        f"actor_rollout_ref.hybrid_engine={options.lend}",
        f"{mode}.hybrid_rollout.enable_switch={options.lend}",
    ]


def arguments(options: argparse.Namespace) -> list[str]:
    """verl's Hydra overrides. Comments explain those that are not sizes."""
    work, folder = options.work, options.folder.resolve()
    model = options.model or str(folder / f"model_{work}")
    response = 160 if work == "sums" else RESPONSE[work]
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    flash = options.attention == "flash_attention_2"
    return [
        f"trainer.v1.trainer_mode={options.mode}",
        # The task.
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/held_out.parquet",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_prompt_length={PROMPT_TOKENS[work]}",
        f"data.max_response_length={response}",
        f"data.seed={options.seed}",
        "reward.reward_manager.source=importlib",
        "reward.reward_manager.name=CountingRewardManager",
        f"reward.reward_manager.module.path={Path(__file__).with_name('verl_reward.py').resolve()}",
        f"+reward.custom_reward_function.reward_kwargs.log={Path('responses.jsonl').resolve()}",
        # The objective, as in prepare.recipe. bypass_mode: old log-probs are those of the engine, as in asynchronous mtpctl. This also
        # saves verl a forward pass.
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        "algorithm.rollout_correction.bypass_mode=True",
        f"{actor}.use_kl_loss=False",
        f"{actor}.entropy_coeff=0",
        f"{actor}.loss_agg_mode=token-mean",
        f"{actor}.clip_ratio_low=0.2",
        f"{actor}.clip_ratio_high=0.28",
        f"{actor}.clip_ratio_c=3.0",
        f"{actor}.ppo_mini_batch_size={PROMPTS // MINIBATCHES}",
        f"{actor}.optim.lr={RATE[work]}",
        f"{actor}.optim.lr_warmup_steps={WARMUP[work]}",
        f"{actor}.optim.betas=[0.9,0.95]",
        f"{actor}.optim.weight_decay=0.0",
        # The trainer. Packed sequences, dynamic batches and no activation recomputation are what verl's performance guide recommends if
        # memory allows.
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.model.use_remove_padding={flash}",
        f"+actor_rollout_ref.model.override_config.attn_implementation={options.attention}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu=16384",
        # The engine. max_num_seqs (default 256) has room for the responses of an update, and in the asynchronous modes of two, because the
        # next batch is requested during an update. CUDA graphs and prefix caching are on by default.
        f"{rollout}.name=vllm",
        f"{rollout}.n={GROUP}",
        f"{rollout}.temperature=1.0",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization={options.gpu_memory}",
        f"{rollout}.max_num_seqs={PROMPTS * GROUP * (1 if options.mode == 'sync' else 2)}",
        f"{rollout}.seed={options.seed}",
        f"{rollout}.agent.num_workers={options.workers}",
        f"reward.num_workers={options.workers}",
        # Held-out rows are sampled once at temperature 1, as mtpctl does.
        f"{rollout}.val_kwargs.do_sample=True",
        f"{rollout}.val_kwargs.temperature=1.0",
        f"{rollout}.val_kwargs.n=1",
        f"trainer.val_before_train={work == 'sums'}",
        f"trainer.test_freq={options.eval_every if work == 'sums' else -1}",
        "trainer.logger=[console]",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={options.updates}",
        "trainer.total_epochs=10",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.project_name=peers",
        f"trainer.experiment_name={work}",
        # The bundle has no dashboard. verl's actors reserve more CPUs in Ray than a host with 16 cores has.
        "+ray_kwargs.ray_init.include_dashboard=False",
        "ray_kwargs.ray_init.num_cpus=64",
        *(separate(options) if options.mode == "separate_async" else []),
        *options.set,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=tuple(PROMPT_TOKENS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="default: the folder's random model")
    parser.add_argument("--mode", choices=("sync", "colocate_async", "separate_async"), default="sync")
    parser.add_argument("--lend", action="store_true", help="separate_async: an engine on the trainer's GPU too")
    parser.add_argument("--attention", choices=("flash_attention_2", "sdpa"), default="flash_attention_2")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=8, help="agent-loop and reward workers each")
    parser.add_argument("--gpu-memory", type=float, default=0.5, help="share of the GPU's memory for the engine")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further override")
    parser.add_argument("--cfg", action="store_true", help="print the composed configuration")
    options = parser.parse_args()
    if options.mode == "separate_async" and not options.lend:
        # verl 0.9.1 passes `flush` to a message of level INFO in this mode, which raises TypeError if the level is enabled.
        os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *(["--cfg", "job"] if options.cfg else []), *arguments(options)]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
