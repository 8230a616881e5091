"""Run the measurements of docs/benchmarks one after another: on GPUs, or at toy size on a CPU.

    python benchmarks/everything.py --plan                           # print the commands with GPUs and minutes, and stop
    python benchmarks/everything.py --on gpu --only rl-7b-x4 --plan  # the same for GPUs, on any machine
    python benchmarks/everything.py --out runs/bench

Each measurement is a command that sees all GPUs of the machine. Its output goes to NAME.out and NAME.log in the folder. Exit code 6 if a
bound was missed, 5 if a command failed, exceeded its minutes or needs more GPUs.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from harness import parser
from mtpctl.bench.rollout_engines import cycle_config, write_cycle_model

CYCLE_MODEL = "{out}/cycle7b"
RL_7B = (
    f"--set model.path={CYCLE_MODEL} --set model.tokenizer=bytes --set data.chat_template=false "
    "--set 'data.task={name: reverse, min_digits: 299, max_digits: 299, train_size: 4000, eval_size: 8}' "
    "--set train.rl.prompts_per_step=32 --set train.rl.dynamic_sampling=false --set train.rl.overlong.enabled=false "
    "--set train.checkpoint_every=0 --set train.keep_checkpoints=0 --set train.eval_every=100 "
    "--set rollout.max_tokens=256 --set rollout.context=1024 --set rollout.eager=true --set async.sync_every=2 --seed 0 --json"
)
"""RL on the cycle model: prompts of 300 tokens, responses that end after 197 tokens, and equal rewards."""
DATA_PARALLEL = "--set 'train.parallel={tp: 1, dp: 2, sequence_parallel: false}' --set train.distributed_optimizer=true"
EIGHT_ON_FOUR = (
    "--set cluster.gpus_per_node=4 --set train.gpus=0.6 --set rollout.gpus=0.4 --set logprob.gpus=0.4 --set rollout.gpu_memory=0.3 "
    "--set rollout.kv_cache_bytes=25769803776 --set sync.transport=ipc"
)
"""Two processes per GPU."""
SHORT = "--set train.rl.steps=6 --set train.eval_every=3 --json"


@dataclass(frozen=True)
class Task:
    """A measurement. gpus: number of GPUs that it needs. minutes: time limit. command: `{out}` stands for the folder of results."""

    name: str
    gpus: int
    minutes: float
    command: str

    def words(self, out: Path) -> list[str]:
        return [word.replace("{out}", str(out)) for word in shlex.split(self.command)]


def rl_7b(name: str, gpus: int, minutes: float, overlay: str, options: str) -> Task:
    return Task(name, gpus, minutes, f"mtpctl bench async mimo7b_mtp --overlay {overlay} --out {{out}}/{name} {options} {RL_7B}")


BOTH_ARMS = "--arm partial --arm partial-server --set train.rl.steps=6"
ON_GPU = [
    rl_7b("rl-7b-x4", 4, 8, "h200x4", BOTH_ARMS),
    rl_7b("rl-7b-x8-on-4", 4, 6, "h200x8", f"--arm partial-server --set train.rl.steps=6 {EIGHT_ON_FOUR}"),
    rl_7b("rl-7b-x4-dp", 3, 5, "h200x4", f"--arm partial --set train.rl.steps=4 --set train.tokens_per_microbatch=8192 {DATA_PARALLEL}"),
    rl_7b("rl-7b-lora", 3, 7, "h200x3_lora", BOTH_ARMS),
    rl_7b("rl-7b-x2", 2, 6, "h200x2", "--arm partial-server --set train.rl.steps=4"),
    Task("sync-weights", 2, 6, "mtpctl bench sync-weights --eager --repeats 5 --transport nccl --transport ipc --json"),
    Task("sharded-head", 2, 3, "benchmarks/sharded_head.py --ranks 2"),
    Task("async", 1, 42, "mtpctl bench async mimo_small_mtp --overlay long_tail --out {out}/async --json"),
    Task("mtp", 1, 30, "mtpctl bench mtp mimo_small_mtp --together --seed 0 --seed 1 --seed 2 --out {out}/mtp --json"),
    Task("rollout", 1, 13, f"mtpctl bench rollout --model {CYCLE_MODEL} --json"),
    Task("logprob", 1, 6, "mtpctl bench logprob --json"),
    Task("train-step", 1, 3, "mtpctl bench train-step --json"),
    Task("train-step-all-response", 1, 3, "mtpctl bench train-step --prompt-share 0.02 --json"),
    Task("update-lora", 1, 2, "benchmarks/update.py --lora 16"),
    Task("update-lora-offload", 1, 3, "benchmarks/update.py --lora 16 --offload params,optimizer,grads"),
    Task("update-offload", 1, 4, "benchmarks/update.py --offload optimizer"),
    Task("fused-kernels", 1, 3, "mtpctl bench fused-kernels --json"),
    Task("kernel-errors", 1, 3, "benchmarks/kernel_errors.py"),
    Task("draft-losses", 1, 3, "benchmarks/draft_losses.py"),
    Task("multistep-loss", 1, 3, "benchmarks/multistep_loss.py"),
    Task("many-receivers", 2, 4, "benchmarks/many_receivers.py"),
    Task("kept-cache", 1, 7, "benchmarks/kept_cache.py speed"),
    Task("sync-weights-shared", 1, 4, "mtpctl bench sync-weights --shared --eager --repeats 5 --json"),
]
ON_CPU = [
    Task("fused-kernels", 0, 3, "mtpctl bench fused-kernels --json"),
    Task("logprob", 0, 5, "mtpctl bench logprob --requests 16 --rounds 1 --json"),
    Task("rollout", 0, 8, "mtpctl bench rollout --tokens 64 --rounds 1 --batch 8 --json"),
    Task("sync-weights", 0, 5, "mtpctl bench sync-weights --repeats 3 --json"),
    Task("relay-chain", 0, 2, "benchmarks/relay_chain.py"),
    Task("kept-cache", 0, 3, "benchmarks/kept_cache.py speed --requests 8 --prompt 128 --tokens 128 --shape tiny"),
    Task("numerics", 0, 10, "benchmarks/numerics.py --rounds 3"),
    Task("mtp", 0, 15, f"mtpctl bench mtp tiny_mtp --out {{out}}/mtp {SHORT}"),
    Task("async", 0, 15, f"mtpctl bench async tiny_mtp --out {{out}}/async --seed 0 --least-speedup 0 {SHORT}"),
]


def run(task: Task, out: Path) -> int | None:
    """Run a task. Returns its exit code; None if it exceeded its time limit, after which all its processes are killed."""
    program, *command_arguments = task.words(out)
    command = [sys.executable, *(["-m", "mtpctl"] if program == "mtpctl" else [program]), *command_arguments]
    with (out / f"{task.name}.out").open("wb") as output, (out / f"{task.name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=log, start_new_session=True)
        try:
            return process.wait(60 * task.minutes)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> None:
    gpus = torch.cuda.device_count()
    arguments = parser(__doc__)
    arguments.add_argument("--out", type=Path, default=Path("runs/bench"), help="existing runs in the folder are reused")
    arguments.add_argument("--only", action="append", metavar="NAME", help="only this measurement; may be repeated")
    arguments.add_argument("--on", choices=("gpu", "cpu"), default="gpu" if gpus else "cpu")
    arguments.add_argument("--plan", action="store_true", help="print the commands and stop")
    options = arguments.parse_args()
    tasks = {task.name: task for task in (ON_GPU if options.on == "gpu" else ON_CPU)}
    for name in options.only or ():
        if name not in tasks:
            arguments.error(f"--only: there is no {name}; there are {', '.join(tasks)}")
    selected = [tasks[name] for name in options.only or tasks]
    if options.plan:
        for task in selected:
            print(f"{task.name} ({task.gpus} GPUs, {task.minutes:g} min): {shlex.join(task.words(options.out))}")
        return

    options.out.mkdir(parents=True, exist_ok=True)
    codes: set[int | None] = set()
    for task in selected:
        if task.gpus > gpus:
            print(f"{task.name}: needs {task.gpus} GPUs", flush=True)
            codes.add(None)
            continue
        if CYCLE_MODEL in task.command:
            folder = Path(CYCLE_MODEL.format(out=options.out))
            write_cycle_model(folder, cycle_config("mimo7b"), acceptance=0.75, device="cuda")
        code = run(task, options.out)
        verdict = "exceeded its minutes" if code is None else {0: "ok", 6: "a bound was missed"}.get(code, f"failed ({code})")
        print(f"{task.name}: {verdict}", flush=True)
        codes.add(code)
    sys.exit(5 if codes - {0, 6} else max(code or 0 for code in codes))


if __name__ == "__main__":
    main()
