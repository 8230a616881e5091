"""Compare rollout with FP8 and bf16 weights: tokens/s with and without drafts, acceptance, and the live weights after three syncs.

The engines of a model start concurrently, each in a separate process on the same GPU, and are then measured in turn with 64 and 256
requests; an engine that is not measured idles. Unless `--no-syncs` is given, the FP8 engine (with drafts if the model has MTP layers) is
also updated three times, and its live tensors are compared with those of a new engine that loads the folder that `convert-hf --dtype fp8`
exports. Without `--model`, models with the shapes of MiMo-7B (with its MTP layer as drafter) and Qwen3-30B-A3B and random weights are used;
their drafts are almost never accepted, so acceptance needs a trained model. `--engines` selects other kernels, or engines that run the
model in the core's process. Exit code 6: an engine with FP8 is less than 1.2 times (1.3 with experts, 1.15 with drafts) as fast as bf16, or
live tensors differ.

    python benchmarks/fp8_rollout.py
    python benchmarks/fp8_rollout.py --model FOLDER      # a trained model
    python benchmarks/fp8_rollout.py --toy               # on a CPU; checks the weights, its speed means nothing
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fp8_folder import COMMON, SHAPES, TOY, run_conversion
from harness import finish, parser, print_environment

BOUNDS = {"dense": 1.2, "experts": 1.3, "drafts": 1.15}
GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
"""Batch sizes of CUDA graphs. DeepGEMM compiles kernels for each, so that vLLM's default of 51 sizes takes minutes."""
WARMUP_ROUNDS = 5
"""In the first rounds kernels are compiled when a batch size first occurs."""
WITH_DEEP_GEMM = {"VLLM_DEEP_GEMM_WARMUP": "skip"}
"""Kernels are compiled when graphs are captured and in the warm-up rounds, instead of for all batch sizes at the start."""
DEEP_GEMM = {"linear_backend": "deep_gemm"}
ONE_PROCESS = {"distributed_executor_backend": "uni"}
FLASHINFER = {"attention_backend": "FLASHINFER"}
UNFUSED: dict[str, Any] = {"compilation_config": {"pass_config": {"fuse_act_quant": False}}}
"""SwiGLU and the quantization of its result are separate kernels."""
ENGINES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "bf16": ("none", {}, {}),
    "bf16, one process": ("none", ONE_PROCESS, {}),
    "FP8": ("fp8", {}, WITH_DEEP_GEMM),
    "FP8, DeepGEMM": ("fp8", DEEP_GEMM, WITH_DEEP_GEMM),
    "FP8, DeepGEMM, one process": ("fp8", DEEP_GEMM | ONE_PROCESS, WITH_DEEP_GEMM),
    "FP8, DeepGEMM, unfused": ("fp8", DEEP_GEMM | UNFUSED, WITH_DEEP_GEMM),
    "FP8, DeepGEMM, FP8 cache": ("fp8", DEEP_GEMM | {"kv_cache_dtype": "fp8"}, WITH_DEEP_GEMM),
    "bf16, FlashInfer": ("none", FLASHINFER, {}),
    "FP8, DeepGEMM, unfused, FlashInfer": ("fp8", DEEP_GEMM | UNFUSED | FLASHINFER, WITH_DEEP_GEMM),
    "FP8, CUTLASS": ("fp8", {"linear_backend": "cutlass"}, {}),
}
"""Engines to compare, by name: quantization, engine arguments, and environment variables. By default, the model runs in a process of its
own on a GPU. vLLM chooses the kernel: on Hopper, FlashInfer's below 32 rows, DeepGEMM's otherwise."""


def make_settings(order: dict[str, Any]) -> Any:
    from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
    from mtpctl.rollout.vllm.settings import build_engine_settings

    device = "cpu" if order["toy"] else "cuda"
    sizes: dict[str, Any] = {"context": 128} if order["toy"] else {"context": 1024, "gpu_memory": 0.05}
    args: dict[str, Any] = {} if order["toy"] or order["eager"] else {"cudagraph_capture_sizes": GRAPH_SIZES}
    args |= order["engine_args"]
    if order["profile"]:
        args["profiler_config"] = {"profiler": "torch", "torch_profiler_dir": order["profile"], "torch_profiler_with_stack": False}
    config = VllmConfig(
        max_in_flight=256,
        eager=order["eager"],
        kv_cache_bytes=order["kv_cache_bytes"],
        quantization=order["quantization"],
        speculation=SpeculationConfig(num_tokens=order["drafts"]),
        engine_args=args,
        **sizes,
    )  # type: ignore[arg-type]
    return build_engine_settings(config, model=order["folder"], precision="bf16", device=device)  # type: ignore[arg-type]


async def measure_rate(engine: Any, requests: int, prompt: int, tokens: int, vocab: int) -> tuple[float, float | None]:
    """Generated tokens/s, and the share of drafts that were accepted."""
    from mtpctl.samples import GenerationRequest, Sample

    async def respond(index: int) -> Any:
        ids = [(7919 * (i + 1) + 104729 * index) % vocab for i in range(prompt)]
        return await engine.generate(GenerationRequest(Sample(str(index), "g", ids), tokens, seed=index, temperature=1.0))

    await asyncio.gather(*map(respond, range(8)))
    began = time.perf_counter()
    samples = await asyncio.gather(*map(respond, range(requests)))
    seconds = time.perf_counter() - began
    drafted = sum(sample.speculation.drafted for sample in samples)
    accepted = sum(sample.speculation.accepted for sample in samples)
    return sum(len(sample.response_ids) for sample in samples) / seconds, accepted / drafted if drafted else None


async def serve(order: dict[str, Any]) -> None:
    """Start one engine, and execute the commands of standard input: `REQUESTS`, `profile REQUESTS`, `sums SYNCS`."""
    from mtpctl.rollout.vllm.client import VllmClient
    from mtpctl.rollout.vllm.engine import VllmEngine

    began = time.perf_counter()
    engine = await VllmEngine.start(make_settings(order))

    def answer(result: object) -> None:
        print("result", json.dumps(result), flush=True)

    try:
        answer(time.perf_counter() - began)
        while command := (await asyncio.to_thread(sys.stdin.readline)).split():
            match command:
                case ["sums", syncs]:
                    await apply_updates(engine, Path(order["work"]), syncs=int(syncs))
                    answer((await VllmClient(engine._llm).rpc("mtpctl_live_sums"))[0])
                case ["profile", requests]:
                    await engine._llm.start_profile()
                    rate = await measure_rate(engine, int(requests), order["prompt"], 32, order["vocab"])
                    await engine._llm.stop_profile()
                    answer(rate)
                case [requests]:
                    answer(await measure_rate(engine, int(requests), order["prompt"], order["tokens"], order["vocab"]))
    finally:
        await engine.shutdown()


async def apply_updates(engine: Any, work: Path, *, syncs: int) -> None:
    """Update the engine with changed weights, and last with those of the folder `last`; verify each of the `syncs`."""
    from mtpctl.convert.model_weights import ModelWeights
    from mtpctl.families.quantization import select_fp8_names
    from mtpctl.families.tensors import section_of
    from mtpctl.sync.sender import Publisher
    from mtpctl.sync.store import VersionStore

    weights = ModelWeights(work / "last")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as store:
        publisher = Publisher(
            VersionStore(store),
            bucket_bytes=1 << 30,
            section_of=lambda name: section_of(name, weights.shape),
            quantized=select_fp8_names(weights.shape),
        )
        for version in range(1, syncs + 1):
            export = ((name, tensor * (syncs + 1 - version)) for name, tensor in weights.items())
            await engine.update(publisher.publish(export, version, checksums=True), verify=True)


class EngineProcess:
    """`serve` in a separate process."""

    def __init__(self, order: dict[str, Any], variables: dict[str, str]) -> None:
        environment = os.environ | variables | ({"OMP_NUM_THREADS": "1"} if order["toy"] else {})
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def read_result(self) -> Any:
        """The answer to a command, or the seconds of the start. Raises RuntimeError if the process ended."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("result "):
                return json.loads(line.removeprefix("result "))
        raise RuntimeError(f"an engine ended with exit code {self.process.wait()}")

    def ask(self, command: str) -> Any:
        assert self.process.stdin
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.read_result()

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def measure_model(name: str, folder: Path, work: Path, arguments: Any) -> list[str]:
    """Print the rows of one model. Returns the missed bounds."""
    from mtpctl.convert.hf_folder import HfFolder

    shape = HfFolder.open(folder).shape
    order = {"toy": arguments.toy, "folder": str(folder), "work": str(work), "vocab": arguments.prompt_vocab or shape.vocab}
    order |= {"prompt": arguments.prompt, "tokens": arguments.tokens, "eager": False, "engine_args": {}, "profile": arguments.profile}
    order["kv_cache_bytes"] = 64 << 20 if arguments.toy else int(arguments.kv_gib * (1 << 30))
    engines = {}
    for drafts in arguments.drafts if shape.mtp_layers else (0,):
        for weights in arguments.engines:
            quantization, engine_args, variables = ENGINES[weights]
            changes = {"drafts": drafts, "quantization": quantization, "engine_args": engine_args}
            engines[drafts, weights] = EngineProcess(order | changes, variables)
    for (drafts, weights), engine in engines.items():
        print(f"{name}, {drafts} draft tokens, {weights}: started after {engine.read_result():.0f} s", file=sys.stderr, flush=True)
    misses = []
    for requests in arguments.requests:
        rates: dict[tuple[int, str], list[float]] = {key: [] for key in engines}
        acceptance: dict[tuple[int, str], float | None] = {}
        for round_number in range(-WARMUP_ROUNDS, arguments.rounds):
            for key, engine in engines.items():
                rate, acceptance[key] = engine.ask(str(requests))
                if round_number >= 0:
                    rates[key].append(rate)
        for (drafts, weights), values in rates.items():
            gain = statistics.median(values) / statistics.median(rates[drafts, "bf16"])
            accepted = acceptance[drafts, weights]
            spread = f"{statistics.median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})"
            print(
                f"| {name} | {drafts} | {requests} | {weights} | {spread} | {gain:.2f} | {'' if accepted is None else f'{accepted:.1%}'} |",
                flush=True,
            )
            bound = BOUNDS["drafts" if drafts else "experts" if shape.moe else "dense"]
            if weights.startswith("FP8") and gain < bound and not arguments.toy:
                misses.append(f"{name}, {weights}, {drafts} draft tokens, {requests} requests: {gain:.2f} times as fast, below {bound}")
    if arguments.profile:
        for engine in engines.values():
            engine.ask(f"profile {arguments.requests[0]}")
    if arguments.syncs:
        drafts = max(arguments.drafts) if shape.mtp_layers else 0
        misses += compare_live_tensors(name, engines[drafts, "FP8"], order | {"drafts": drafts}, arguments.syncs)
    for engine in engines.values():
        engine.end()
    return misses


def compare_live_tensors(name: str, updated: EngineProcess, order: dict[str, Any], syncs: int) -> list[str]:
    """Update an FP8 engine, and compare it with a vLLM that loads the exported folder. Returns the missed bounds."""
    work = Path(order["work"])
    (work / "last").symlink_to(order["folder"])
    run_conversion(order["folder"], work / "checkpoint")
    run_conversion(work / "checkpoint", work / "fp8", "--dtype", "fp8")
    live = updated.ask(f"sums {syncs}")
    new_engine = EngineProcess(order | {"folder": str(work / "fp8"), "quantization": "none", "eager": True}, WITH_DEEP_GEMM)
    new_engine.read_result()
    expected = new_engine.ask("sums 0")
    new_engine.end()
    differing_tensors = [key for key, value in live.items() if expected.get(key) != value]
    print(f"{name}: {len(expected)} live tensors after {syncs} syncs, {len(differing_tensors)} differ from a new engine's", flush=True)
    if differing_tensors or live.keys() != expected.keys():
        return [f"{name}: after {syncs} syncs {differing_tensors[:3] or 'some'} differ from a new engine's"]
    return []


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, help="a folder to measure instead of random models")
    options.add_argument("--only", choices=SHAPES, help="one of the random models")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    options.add_argument("--prompt", type=int, default=256)
    options.add_argument("--prompt-vocab", type=int, help="prompts consist of tokens below this; default: the model's vocabulary")
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--drafts", type=int, nargs="+", default=[0, 1], help="draft tokens, for a model with MTP layers")
    options.add_argument("--rounds", type=int, default=3, help=f"measured rounds, after {WARMUP_ROUNDS} for warm-up")
    options.add_argument("--kv-gib", type=float, default=20.0, help="KV cache of each engine")
    options.add_argument("--engines", choices=ENGINES, nargs="+", default=["bf16", "FP8"], help="engines to compare; bf16 is required")
    options.add_argument("--no-syncs", dest="syncs", action="store_const", const=0, default=3, help="measure only the rates")
    options.add_argument(
        "--profile", default="", help="write a trace of each engine with the first of --requests into this folder; GPU only"
    )
    options.add_argument("--work", type=Path, help="where folders are written; default: a temporary directory")
    options.add_argument("--toy", action="store_true", help="narrow models and few tokens, for a CPU")
    options.add_argument("--serve", help="used by the script itself: what one engine does, as JSON")
    arguments = options.parse_args()
    if arguments.serve:
        asyncio.run(serve(json.loads(arguments.serve)))
        return
    if "bf16" not in arguments.engines or (arguments.syncs and "FP8" not in arguments.engines):
        options.error("--engines: must contain bf16, and FP8 unless --no-syncs is given")
    if arguments.toy:
        arguments.requests, arguments.prompt, arguments.tokens, arguments.layers = [8], 16, 16, 2
    print_environment()
    print(
        "| model | draft tokens | requests | weights | tokens/s | relative to bf16 | accepted |\n|---|---|---|---|---|---|---|", flush=True
    )
    misses: list[str] = []
    with tempfile.TemporaryDirectory(dir=arguments.work) as root:
        if arguments.model:
            work = Path(root)
            misses = measure_model(arguments.model.name, arguments.model.resolve(), work, arguments)
        else:
            import torch

            from mtpctl.convert.hf_folder import create_hf_folder

            for name in [arguments.only] if arguments.only else SHAPES:
                fields, work = SHAPES[name], Path(root) / name
                work.mkdir()
                fields = fields | TOY if arguments.toy else fields
                create_hf_folder(COMMON | fields | {"num_hidden_layers": arguments.layers}, work / "hf", 0, dtype=torch.bfloat16)
                misses += measure_model(name, work / "hf", work, arguments)
    finish(misses)


if __name__ == "__main__":
    main()
