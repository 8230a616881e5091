"""Rollout of a small model on one GPU, which is limited by the host: vLLM alone, one engine of mtpctl, and several on that GPU.

    python benchmarks/rollout_host.py --model FOLDER            # a Hugging Face folder with its tokenizer; about 6 minutes on an H100
    python benchmarks/rollout_host.py --toy                     # a tiny model on a CPU

Prompts are random tokens, responses have fixed lengths around a mean, and log-probs are on. Every arm generates the same tokens per slot.
`at once`: requests are admitted as soon as a slot is free, instead of several in one step. `worker`: the engine runs its model in a
separate process, so that scheduling overlaps with it. `vLLM's graphs`: CUDA graphs of steps with up to 512 tokens only.

Bounds on a GPU, relative to vLLM's offline generation with as many requests in flight: one engine 1.5, several engines 3.5. The
controller's loop uses at most 0.3 of a core.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from harness import finish, parser, print_environment
from mtpctl.bench.rollout_model import OFFLINE, Arm, Options, Result, run_benchmark

WORKER = '{"distributed_executor_backend": "mp"}'
GRAPHS = '{"compilation_config": {}}'
ONE_BOUND, SEVERAL_BOUND, LOOP_BOUND = 1.5, 3.5, 0.3


def arms_of(batches: list[int], engines: int, names: list[str]) -> list[Arm]:
    """The arms of each number of requests in flight: several engines with the smallest only, vLLM's graphs with the largest only."""
    arms = []
    for batch in batches:
        arms += [
            Arm(OFFLINE, 0, batch),
            Arm("one engine", 1, batch),
            Arm("one engine, at once", 1, batch, immediate_admission=True),
            Arm("one engine, worker", 1, batch, engine_args=WORKER),
        ]
        if batch == max(batches):
            arms.append(Arm("one engine, vLLM's graphs", 1, batch, engine_args=GRAPHS))
        if batch == min(batches):
            arms += [
                Arm(f"{engines} engines", engines, batch),
                Arm(f"{engines} engines, at once", engines, batch, immediate_admission=True),
            ]
    return [arm for arm in arms if not names or arm.name in names or not arm.engines]


def misses_of(results: list[Result]) -> list[str]:
    """The missed bounds. Several engines are compared with vLLM at each number of requests in flight."""
    vllm = {result.in_flight: statistics.median(result.rates) for result in results if result.what == OFFLINE}
    misses = []
    for result in results:
        if result.what == "one engine" and (ratio := statistics.median(result.ratios)) < ONE_BOUND:
            misses.append(f"{result.what}, {result.in_flight} in flight: {ratio:.2f} of vLLM, bound {ONE_BOUND}")
        if result.what.endswith(" engines"):
            rate = statistics.median(result.rates)
            misses += [
                f"{result.what}: {rate / base:.2f} of vLLM at {in_flight} in flight, bound {SEVERAL_BOUND}"
                for in_flight, base in vllm.items()
                if rate / base < SEVERAL_BOUND
            ]
        if result.loop is not None and result.loop > LOOP_BOUND:
            misses.append(f"{result.what}, {result.in_flight} in flight: controller's loop {result.loop:.2f} cores, bound {LOOP_BOUND}")
    return misses


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, help="folder of the model and its tokenizer")
    arguments.add_argument("--toy", action="store_true", help="toy sizes on a CPU")
    arguments.add_argument("--in-flight", default="256,1024", help="numbers of requests in flight, separated by commas")
    arguments.add_argument("--engines", type=int, default=3)
    arguments.add_argument("--arm", action="append", default=[], help="only this arm, and vLLM; may be repeated")
    arguments.add_argument("--prompt", type=int, default=60)
    arguments.add_argument("--tokens", type=int, default=39)
    arguments.add_argument("--requests", type=int, default=8, help="requests per slot in a round")
    arguments.add_argument("--rounds", type=int, default=2)
    args = arguments.parse_args()
    if args.toy == (args.model is not None):
        arguments.error("name either --model or --toy")
    print_environment()
    began = time.monotonic()
    show = partial(print, flush=True)
    with tempfile.TemporaryDirectory(prefix="mtpctl-bench-") as scratch:
        if args.toy:
            folder = toy_model(Path(scratch))
            options = Options(folder, "cpu", 8, 12, group=4, requests=3, rounds=1)
            arms = arms_of([32], 2, ["one engine", "one engine, at once", "2 engines"])
        else:
            options = Options(args.model, "cuda", args.prompt, args.tokens, requests=args.requests, rounds=args.rounds)
            arms = arms_of([int(text) for text in args.in_flight.split(",")], args.engines, args.arm)
        results = run_benchmark(options, arms, show)
    show(f"\n{time.monotonic() - began:.0f} s in all")
    if not args.toy:
        finish(misses_of(results))


def toy_model(folder: Path) -> Path:
    """A tiny model with a byte tokenizer."""
    from mtpctl.bench.rollout_engines import TINY, write_cycle_model
    from mtpctl.data.tokenizers import make_byte_tokenizer

    write_cycle_model(folder, TINY, acceptance=0.75, device="cpu")
    make_byte_tokenizer(folder)
    return folder


if __name__ == "__main__":
    main()
