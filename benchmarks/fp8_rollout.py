"""Compare rollout with FP8 and bf16 weights: tokens/s with and without drafts, acceptance, and the live weights after three syncs.

For each quantization and number of drafts, one engine is started in a separate process and serves 64 and 256 requests. One process of
each model with FP8, with drafts if the model has MTP layers, also updates its engine three times and compares its live tensors with those
of a new engine that loads the folder that `convert-hf --dtype fp8` exports. Without `--model`, models with the shapes of MiMo-7B (with its
MTP layer as drafter) and Qwen3-30B-A3B and random weights are used; their drafts are almost never accepted, so acceptance needs a trained
model. Exit code 6: FP8 is less than 1.2 times (1.3 with experts, 1.15 with drafts) as fast as bf16, or live tensors differ.

    python benchmarks/fp8_rollout.py
    python benchmarks/fp8_rollout.py --model FOLDER      # a trained model
    python benchmarks/fp8_rollout.py --toy               # on a CPU; checks the weights, its speed means nothing
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fp8_folder import COMMON, SHAPES, TOY, run_conversion
from harness import finish, parser, print_environment

BOUNDS = {"dense": 1.2, "experts": 1.3, "drafts": 1.15}


def make_settings(folder: str, quantization: str, drafts: int, options: dict[str, Any]) -> Any:
    from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
    from mtpctl.rollout.vllm.settings import engine_settings

    device = "cpu" if options["toy"] else "cuda"
    sizes: dict[str, Any] = {"context": 128, "kv_cache_bytes": 64 << 20} if options["toy"] else {"context": 1024}
    config = VllmConfig(
        max_in_flight=256, eager=options["eager"], quantization=quantization, speculation=SpeculationConfig(num_tokens=drafts), **sizes
    )  # type: ignore[arg-type]
    return engine_settings(config, model=folder, precision="bf16", device=device)  # type: ignore[arg-type]


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


async def serve(order: dict[str, Any]) -> dict[str, Any]:
    """Start one engine and measure; with `check`, update it and return the checksums of its live tensors."""
    from mtpctl.rollout.vllm.client import VllmClient
    from mtpctl.rollout.vllm.engine import VllmEngine

    engine = await VllmEngine.start(make_settings(order["folder"], order["quantization"], order["drafts"], order))
    result: dict[str, Any] = {"rates": {}}
    try:
        for requests in order["requests"]:
            result["rates"][requests] = await measure_rate(engine, requests, order["prompt"], order["tokens"], order["vocab"])
        if order["check"]:
            await apply_updates(engine, Path(order["work"]), syncs=order["syncs"])
            (result["live"],) = await VllmClient(engine._llm).rpc("mtpctl_live_sums")
    finally:
        await engine.shutdown()
    return result


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


def serve_in_process(order: dict[str, Any]) -> dict[str, Any]:
    """`serve` in a separate process."""
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if order["toy"] else {})
    process = subprocess.run(
        [sys.executable, __file__, "--serve", json.dumps(order)], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    (line,) = (line for line in process.stdout.splitlines() if line.startswith("result "))
    result: dict[str, Any] = json.loads(line.removeprefix("result "))
    return result


def measure_model(name: str, folder: Path, work: Path, arguments: Any) -> list[str]:
    """Print the rows of one model. Returns the missed bounds."""
    from mtpctl.convert.hf_folder import HfFolder

    shape, misses = HfFolder.open(folder).shape, []
    (work / "last").symlink_to(folder.resolve())
    run_conversion(folder, work / "checkpoint")
    run_conversion(work / "checkpoint", work / "fp8", "--dtype", "fp8")
    order = {"toy": arguments.toy, "work": str(work), "vocab": shape.vocab, "requests": arguments.requests, "prompt": arguments.prompt}
    order |= {"tokens": arguments.tokens, "syncs": 3, "eager": False}
    for drafts in (0, 1) if shape.mtp_layers else (0,):
        rows, check = {}, drafts == min(shape.mtp_layers, 1)
        for quantization in ("none", "fp8"):
            rows[quantization] = serve_in_process(
                order | {"folder": str(folder), "quantization": quantization, "drafts": drafts, "check": check and quantization == "fp8"}
            )
        for requests in map(str, arguments.requests):
            plain, fp8 = (rows[quantization]["rates"][requests] for quantization in ("none", "fp8"))
            accepted = "" if plain[1] is None else f"{plain[1]:.1%} -> {fp8[1]:.1%}"
            gain, bound = fp8[0] / plain[0], BOUNDS["drafts" if drafts else "experts" if shape.moe else "dense"]
            print(f"| {name} | {drafts} | {requests} | {plain[0]:,.0f} | {fp8[0]:,.0f} | {gain:.2f} | {accepted} |", flush=True)
            if gain < bound and not arguments.toy:
                misses.append(f"{name}, {drafts} draft tokens, {requests} requests: {gain:.2f} times as fast, below {bound}")
        if not check:
            continue
        # vLLM itself loads the exported folder.
        exported = {"folder": str(work / "fp8"), "quantization": "none", "drafts": drafts, "eager": True}
        new_engine = serve_in_process(order | exported | {"check": True, "syncs": 0, "requests": []})
        differing_tensors = [key for key, value in rows["fp8"]["live"].items() if new_engine["live"].get(key) != value]
        print(
            f"{name}, {drafts} draft tokens: {len(new_engine['live'])} live tensors after 3 syncs, "
            f"{len(differing_tensors)} differ from a new engine's"
        )
        if differing_tensors or rows["fp8"]["live"].keys() != new_engine["live"].keys():
            misses.append(f"{name}: after 3 syncs {differing_tensors[:3] or 'some'} differ from a new engine's")
    return misses


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, help="a folder to measure instead of random models")
    options.add_argument("--only", choices=SHAPES, help="one of the random models")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--requests", type=int, nargs="+", default=[64, 256])
    options.add_argument("--prompt", type=int, default=256)
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--work", type=Path, help="where folders are written; default: a temporary directory")
    options.add_argument("--toy", action="store_true", help="narrow models and few tokens, for a CPU")
    options.add_argument("--serve", help="used by the script itself: what one engine does, as JSON")
    arguments = options.parse_args()
    if arguments.serve:
        print("result", json.dumps(asyncio.run(serve(json.loads(arguments.serve)))), flush=True)
        return
    if arguments.toy:
        arguments.requests, arguments.prompt, arguments.tokens, arguments.layers = [8], 16, 16, 2
    print_environment()
    print("| model | draft tokens | requests | bf16 tok/s | FP8 tok/s | ratio | acceptance |\n|---|---|---|---|---|---|---|", flush=True)
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
