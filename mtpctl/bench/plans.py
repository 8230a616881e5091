"""The plans of `mtpctl bench all`: its measurements, with their cards and minutes; those that take many cards come first."""

from __future__ import annotations

from mtpctl.bench.everything import Task

_CYCLE = "{out}/cycle7b"
_RL_7B = (
    f"--set model.path={_CYCLE} --set model.tokenizer=bytes --set data.chat_template=false "
    "--set 'data.task={name: reverse, min_digits: 299, max_digits: 299, train_size: 4000, eval_size: 8}' "
    "--set train.rl.prompts_per_step=32 --set train.rl.dynamic_sampling=false --set train.rl.overlong.enabled=false "
    "--set train.checkpoint_every=0 --set train.keep_checkpoints=0 --set train.eval_every=100 "
    "--set rollout.max_tokens=256 --set rollout.context=1024 --set rollout.eager=true --set async.sync_every=2 --seed 0 --json"
)
"""RL on the cycle model, whose rewards are all equal: prompts of 300 tokens, responses of 197 that end by themselves."""

_X4 = f"bench async mimo7b_mtp --overlay h200x4 --out {{out}}/rl-7b-x4 --arm partial --arm partial-server --set train.rl.steps=6 {_RL_7B}"
_DP = (
    "bench async mimo7b_mtp --overlay h200x4 --out {out}/rl-7b-x4-dp --arm partial --set train.rl.steps=4 "
    "--set 'train.parallel={tp: 1, dp: 2, sequence_parallel: false}' --set train.distributed_optimizer=true "
    f"--set train.tokens_per_microbatch=8192 {_RL_7B}"
)
"""The trainer's two cards are data-parallel, where the overlay makes them tensor-parallel."""
_X2 = f"bench async mimo7b_mtp --overlay h200x2 --out {{out}}/rl-7b-x2 --arm partial-server --set train.rl.steps=4 {_RL_7B}"
_X8_ON_4 = (
    "bench async mimo7b_mtp --overlay h200x8 --out {out}/rl-7b-x8-on-4 --arm partial-server --set train.rl.steps=6 "
    "--set cluster.gpus_per_node=4 --set train.gpus=0.6 --set rollout.gpus=0.4 --set logprob.gpus=0.4 --set rollout.gpu_memory=0.3 "
    f"--set rollout.kv_cache_bytes=25769803776 --set sync.transport=ipc {_RL_7B}"
)
"""The layout for eight cards, two processes to a card."""
_LORA = (
    "bench async mimo7b_mtp --overlay h200x3_lora --out {out}/rl-7b-lora --arm partial --arm partial-server "
    f"--set train.rl.steps=6 {_RL_7B}"
)
_LONG_TAIL = "bench async mimo_small_mtp --overlay long_tail --out {out}/async --json"
_MTP = "bench mtp mimo_small_mtp --together --out {out}/mtp --json"

ON_CARDS = [
    Task("cycle-model", 1, 3, f"bench cycle-model {_CYCLE}"),
    Task("rl-7b-x4", 4, 8, _X4, ("cycle-model",)),
    Task("rl-7b-x8-on-4", 4, 6, _X8_ON_4, ("cycle-model",)),
    Task("rl-7b-x4-dp", 3, 5, _DP, ("cycle-model",)),
    Task("rl-7b-lora", 3, 7, _LORA, ("cycle-model",)),
    Task("rl-7b-x2", 2, 6, _X2, ("cycle-model",)),
    Task("sync-weights", 2, 6, "bench sync-weights --eager --repeats 5 --transport nccl --transport ipc --json"),
    Task("fused-kernels-tp2", 2, 3, "bench fused-kernels --tp 2 --json"),
    *(Task(f"async-{seed}", 1, 14, f"{_LONG_TAIL} --seed {seed}") for seed in range(3)),
    *(Task(f"mtp-{seed}", 1, 10, f"{_MTP} --seed {seed}") for seed in range(3)),
    Task("rollout", 1, 13, f"bench rollout --model {_CYCLE} --json", ("cycle-model",)),
    Task("logprob", 1, 6, "bench logprob --json"),
    Task("train-step", 1, 3, "bench train-step --json"),
    Task("train-step-all-response", 1, 3, "bench train-step --prompt-share 0.02 --json"),
    Task("update-lora", 1, 2, "bench update --lora 16 --json"),
    Task("update-lora-offload", 1, 3, "bench update --lora 16 --offload params,optimizer,grads --json"),
    Task("update-offload", 1, 4, "bench update --offload optimizer --json"),
    Task("fused-kernels", 1, 3, "bench fused-kernels --json"),
    Task("sync-weights-shared", 1, 4, "bench sync-weights --shared --eager --repeats 5 --json"),
]
"""Measurements on H200s."""

_SHORT = "--set train.rl.steps=6 --set train.eval_every=3 --json"

ON_A_LAPTOP = [
    Task("fused-kernels", 0, 3, "bench fused-kernels --json"),
    Task("logprob", 0, 5, "bench logprob --requests 16 --rounds 1 --json"),
    Task("rollout", 0, 8, "bench rollout --tokens 64 --rounds 1 --batch 8 --json"),
    Task("sync-weights", 0, 5, "bench sync-weights --repeats 3 --json"),
    Task("mtp", 0, 15, f"bench mtp tiny_mtp --out {{out}}/mtp {_SHORT}"),
    Task("async", 0, 15, f"bench async tiny_mtp --out {{out}}/async --seed 0 --least-speedup 0 {_SHORT}"),
]
"""Measurements at toy size on a CPU: they show that everything runs, and what it prints."""
