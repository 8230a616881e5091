"""`numerics: bitwise` on one GPU: operations, log-probs of engine and trainer, and speed against the default numerics.

    python benchmarks/bitwise_gpu.py                            # at most 8 minutes on an H100
    python benchmarks/bitwise_gpu.py --parts small,mismatch
    python benchmarks/bitwise_gpu.py --device cpu               # toy sizes: fp32, and kernels in Triton's interpreter

Each part runs in separate processes, and a failure does not stop the next part. Output is printed line by line. The logs of the processes
are in `--logs`. If a process fails, the last lines of its log are printed.

1. `operations`: is a row's result independent of the other rows, are engine's and trainer's equal, what does each cost
   (`benchmarks/bitwise_operations.py`).
2. `small`: a random MiMo of four layers in engines with CUDA graphs and 0, 1 and 3 drafts, and in an eager engine; chunked prompts, prefix
   cache hits, and many requests in flight. Prints the largest difference of log-probs from the trainer's: it must be 0.
3. `mismatch`: the first module of this model whose outputs differ between engine and trainer (`mtpctl doctor --mismatch`).
4. `large`: MiMo-7B's shape with random weights. Differences and tokens per second with `bitwise`, the trainer's forward and backward pass
   in both modes, then tokens per second with the default numerics. Skipped if `small` finds a difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

PARTS = ("operations", "small", "mismatch", "large")
SMALL: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1408,
    "vocab_size": 8192,
    "rope_theta": 640000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": True,
    "max_position_embeddings": 1024,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
TOY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 112,
}
TAIL = 25
"""Lines of a failed process's log that are printed."""


def say(text: str) -> None:
    print(text, flush=True)


# ---------------------------------------------------------------------------------------------------------- processes


@dataclass
class Runner:
    """Starts processes of this script, which end at the deadline. failed: names of those that did."""

    device: str
    logs: Path
    deadline: float
    failed: list[str] = field(default_factory=list)

    def start(self, name: str, command: Many[object], **environment: str) -> tuple[str, subprocess.Popen[bytes], IO[bytes]]:
        log = (self.logs / f"{name}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-u", *map(str, command)], env=os.environ | environment, stderr=log, start_new_session=True
        )
        return name, process, log

    def wait(self, started: tuple[str, subprocess.Popen[bytes], IO[bytes]], seconds: float) -> bool:
        """Whether the process succeeded. Ends it and its children after `seconds`, or at the deadline."""
        name, process, log = started
        began = time.monotonic()
        try:
            code: int | str = process.wait(max(1.0, min(seconds, self.deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            code = f"still running after {time.monotonic() - began:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()
        if code == 0:
            return True
        self.failed.append(name)
        lines = (self.logs / f"{name}.log").read_text(errors="replace").splitlines()[-TAIL:]
        say(f"  FAILED: {name}: {code}\n" + "\n".join(f"    {line[:300]}" for line in lines))
        return False

    def run(self, name: str, command: Many[object], seconds: float, **environment: str) -> bool:
        return self.wait(self.start(name, command, **environment), seconds)


def child(part: str, device: str, **options: object) -> list[object]:
    """The command of a process that runs `part`."""
    values = [str(value) for name, option in options.items() for value in (f"--{name}", option)]
    return [Path(__file__), "--child", part, "--device", device, *values]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--parts", default=",".join(PARTS))
    arguments.add_argument("--deadline", type=float, default=465.0, help="seconds after which everything ends")
    arguments.add_argument("--logs", type=Path, default=None, help="folder of the processes' logs")
    arguments.add_argument("--child", default="", help=argparse.SUPPRESS)
    for name, kind, default in (
        ("folder", Path, None), ("out", Path, None), ("samples", str, ""), ("size", str, "small"), ("drafts", int, 0),
        ("eager", int, 0), ("responses", int, 48), ("tokens", int, 96), ("flight", int, 24), ("numerics", str, "bitwise"),
    ):  # fmt: skip
        arguments.add_argument(f"--{name}", type=kind, default=default, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        CHILDREN[options.child](options)
        return
    logs = options.logs or Path(tempfile.mkdtemp(prefix="bitwise-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    runner, parts = Runner(options.device, logs, time.monotonic() + options.deadline), options.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        arguments.error(f"--parts: {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    say(f"logs in {logs}")
    with tempfile.TemporaryDirectory(prefix="bitwise-") as scratch:
        run_parts(runner, parts, Path(scratch))
    say(f"\nfailed: {', '.join(runner.failed) or 'nothing'}; {options.deadline - (runner.deadline - time.monotonic()):.0f} s")


def run_parts(runner: Runner, parts: list[str], scratch: Path) -> None:
    device, began, agree = runner.device, time.monotonic(), True

    def title(text: str) -> None:
        say(f"\n## {text} ({time.monotonic() - began:.0f} s)")

    if "operations" in parts:
        title("operations: rows of a call, engine against trainer, times")
        script, interpreted = Path(__file__).with_name("bitwise_operations.py"), {} if device == "cuda" else {"TRITON_INTERPRET": "1"}
        runner.run("operations", [script, "--device", device], 130, **interpreted)
        if device == "cuda":
            runner.run("library", [script, "--library"], 45)
    if {"small", "mismatch"} & set(parts):
        title("small model: engines and trainer")
        runner.run("folder", child("folder", device, folder=scratch / "small"), 60)
    if "small" in parts:
        agree = small(runner, scratch)
    if "mismatch" in parts:
        title("mismatch: the first module that differs, one draft, eager")
        runner.run("mismatch", child("mismatch", device, folder=scratch / "small", out=scratch), 150)
    if "large" in parts:
        title("MiMo-7B's shape")
        if not agree:
            say("  skipped: the small model's log-probs differ, or were not compared")
        elif device == "cpu":
            say("  skipped: needs a GPU")
        else:
            large(runner, scratch)


def small(runner: Runner, scratch: Path) -> bool:
    """Whether all log-probs of the small model agree. The engines run at the same time."""
    device, cases = runner.device, [(0, 0), (1, 0), (3, 0), (1, 1)] if runner.device == "cuda" else [(1, 1), (3, 1)]
    started, files = [], []
    for drafts, eager in cases:
        file = scratch / f"{'eager' if eager else 'graphs'}-{drafts}.json"
        files.append(file)
        command = child("engine", device, folder=scratch / "small", drafts=drafts, eager=eager, out=file)
        started.append(runner.start(f"engine-{file.stem}", command))
    ran = [runner.wait(each, 170) for each in started]
    present = [file for file, ok in zip(files, ran, strict=True) if ok]
    if not present:
        return False
    command = child("score", device, folder=scratch / "small", samples=",".join(map(str, present)), out=scratch / "differences.json")
    if not runner.run("score", command, 90):
        return False
    differences: dict[str, float] = json.loads((scratch / "differences.json").read_text())
    return all(ran) and not any(differences.values())


def large(runner: Runner, scratch: Path) -> None:
    device, folder = runner.device, Path("/dev/shm" if Path("/dev/shm").is_dir() else scratch) / f"bitwise-{os.getpid()}"
    try:
        if not runner.run("folder-large", child("folder", device, folder=folder, size="large"), 90):
            return
        shared = {"folder": folder, "size": "large", "flight": 64, "tokens": 512}
        file = scratch / "large.json"
        if runner.run("engine-large", child("engine", device, drafts=1, responses=512, out=file, **shared), 200):
            runner.run(
                "score-large", child("score", device, folder=folder, size="large", samples=file, out=scratch / "large-differences"), 90
            )
        runner.run("trainer-large", child("trainer", device, folder=folder, size="large"), 120)
        runner.run("engine-large-default", child("engine", device, drafts=1, responses=256, out=file, numerics="default", **shared), 300)
        for drafts in (0, 3):  # if time is left
            runner.run(f"engine-large-{drafts}", child("engine", device, drafts=drafts, responses=512, out=file, **shared), 200)
            runner.run(f"score-large-{drafts}", child("score", device, folder=folder, size="large", samples=file, out=scratch / "more"), 90)
    finally:
        for path in (*folder.glob("*"), folder):
            path.rmdir() if path.is_dir() else path.unlink()


# ------------------------------------------------------------------------------------------------ in a child's process


def create_folder(options: argparse.Namespace) -> None:
    """A model with random weights, norms and biases, whose logits spread by several nats.

    The next token mostly depends on the last one, and the drafter reads that token's embedding, so that some drafts are accepted.
    """
    import torch
    from safetensors.torch import save_file

    from mtpctl.convert.hf_folder import write_config
    from mtpctl.families.reading import shape_of
    from mtpctl.families.tensors import tensor_shapes

    config = dict(SMALL)
    if options.size == "large":
        from mtpctl.bench.train_step import named_config

        config = dict(named_config(""))
    if options.device == "cpu":
        config |= TOY | {"vocab_size": 512}
    for name in ("bos_token_id", "eos_token_id"):  # so that responses have their full length
        config.pop(name, None)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    generator = torch.Generator(options.device).manual_seed(0)
    options.folder.mkdir(parents=True)
    tensors = {}
    for name, size in tensor_shapes(shape_of(config)).items():
        drawn = torch.randn(size, generator=generator, device=options.device)
        if len(size) == 1:
            drawn = 0.2 * drawn + (0.0 if name.endswith("bias") else 1.0)
        elif name.endswith("input_proj.weight"):
            drawn = torch.eye(size[0], device=options.device).repeat(1, 2)
            drawn[:, : size[0]] = 0.0
        elif "embed_tokens" not in name:
            drawn *= size[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            drawn *= 0.6 * config["num_hidden_layers"] ** -0.5
        elif "lm_head" in name:
            drawn *= 3.0
        tensors[name] = drawn.to(dtype).cpu()
    save_file(tensors, options.folder / "model.safetensors", metadata={"format": "pt"})
    write_config(config | {"torch_dtype": str(dtype).removeprefix("torch.")}, options.folder)


def run_engine(options: argparse.Namespace) -> None:
    """Generate responses and write them to `--out`. Prints tokens per second."""
    if options.device == "cpu":
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    samples, seconds, engine = asyncio.run(_generate(options))
    tokens = sum(len(sample.response_ids) for sample in samples)
    drafted, accepted = (sum(getattr(sample.speculation, name) for sample in samples) for name in ("drafted", "accepted"))
    cached = sum(sample.cached_tokens or 0 for sample in samples)
    options.out.write_text(json.dumps([sample.to_dict() for sample in samples]))
    say(
        f"  {options.size}, {options.numerics}, {'eager' if options.eager else 'CUDA graphs'}, {options.drafts} drafts: "
        f"{len(samples)} responses, {tokens} tokens, {tokens / seconds:.0f} tokens/s; {accepted} of {drafted} drafts accepted, "
        f"{cached} prompt tokens cached; engine started in {engine:.0f} s"
    )


async def _generate(options: argparse.Namespace) -> tuple[list[Any], float, float]:
    from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
    from mtpctl.rollout.vllm.engine import VllmEngine
    from mtpctl.rollout.vllm.settings import engine_settings
    from mtpctl.samples import GenerationRequest, Sample, ids_of

    cuda, is_large = options.device == "cuda", options.size == "large"
    fields: dict[str, Any] = {"threads": 1, "kv_cache_bytes": 48 << 20} if not cuda else {"gpu_memory": 0.85}
    if cuda and not is_large:
        fields = {"gpu_memory": 0.1, "kv_cache_bytes": 1 << 30}  # several engines share the GPU
    rollout = VllmConfig(
        max_in_flight=options.flight,
        context=1024,
        eager=bool(options.eager),
        speculation=SpeculationConfig(num_tokens=options.drafts),
        # Prompts of the small model take several steps, in which other requests decode.
        engine_args={"enable_prefix_caching": True} | ({} if is_large else {"max_num_batched_tokens": 256}),
        **fields,
    )
    settings = engine_settings(
        rollout, model=str(options.folder), precision="bf16" if cuda else "fp32", device=options.device, numerics=options.numerics
    )
    draw = random.Random(options.drafts)
    vocab = 500 if not cuda else 8000
    shared = [draw.randrange(vocab) for _ in range(150)]
    lengths = [256] if is_large else [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 400]
    prompts = []
    for index in range(options.responses):
        own = [draw.randrange(vocab) for _ in range(lengths[index % len(lengths)])]
        prompts.append(own if is_large or index % 2 else shared + own)
    began = time.monotonic()
    engine = await VllmEngine.start(settings)
    started = time.monotonic() - began
    slots = asyncio.Semaphore(options.flight)

    async def respond(number: int, tokens: int) -> Sample:
        async with slots:
            return await engine.generate(GenerationRequest(Sample(f"p{number}", "g", ids_of(prompts[number])), tokens, temperature=1.0))

    try:
        await asyncio.gather(*(respond(number, 8) for number in range(min(options.responses, options.flight))))  # warm-up
        began = time.monotonic()
        samples = await asyncio.gather(*(respond(number, options.tokens) for number in range(options.responses)))
        return samples, time.monotonic() - began, started
    finally:
        await engine.shutdown()


def _trainer(options: argparse.Namespace, numerics: str, **fields: Any) -> Any:
    from harness import parser  # noqa: F401  installs stand-ins for CUDA calls before Megatron is imported
    from mtpctl.convert.hf_folder import HfFolder
    from mtpctl.recipe.parallel import ParallelConfig
    from mtpctl.trainer.config import EngineConfig
    from mtpctl.trainer.engine import MegatronEngine

    precision = "bf16" if options.device == "cuda" else "fp32"
    config = EngineConfig(ParallelConfig(), precision, numerics=numerics, tokens_per_microbatch=8192, **fields)  # type: ignore[arg-type]
    return MegatronEngine(HfFolder.open(options.folder), config)


def run_score(options: argparse.Namespace) -> None:
    """Compare the log-probs of `--samples` with the trainer's in both modes, and write the largest differences with `bitwise`."""
    import numpy as np

    from mtpctl.samples import Sample
    from mtpctl.trainer.batch import Sequence

    largest: dict[str, float] = {}
    for numerics in ("bitwise",) if options.size == "large" else ("bitwise", "default"):
        trainer = _trainer(options, numerics, train=False)
        try:
            for file in options.samples.split(","):
                samples = [Sample.from_dict(each) for each in json.loads(Path(file).read_text())]
                inputs = [Sequence(list(sample.token_ids), len(sample.prompt_ids), list(sample.loss_mask)) for sample in samples]
                began = time.monotonic()
                scores = trainer.score(inputs)
                took = time.monotonic() - began
                own = np.concatenate([np.asarray(score.logprobs, np.float32) for score in scores])
                behaviour = np.concatenate([np.asarray(sample.behaviour_logprobs, np.float32) for sample in samples])
                errors = np.abs(own - behaviour)
                say(
                    f"  {Path(file).stem}, trainer {numerics}: {int((errors != 0).sum())} of {len(errors)} log-probs differ, at most "
                    f"{errors.max():.3g}, {errors.mean():.3g} on average; log-prob {behaviour.mean():.2f} on average, "
                    f"{sum(len(each.token_ids) for each in inputs) / took:.0f} tokens/s scored"
                )
                if numerics == "bitwise":
                    largest[file] = float(errors.max()) if np.isfinite(errors).all() else float("inf")
                    _locate(samples, own != behaviour)
        finally:
            trainer.close()
    options.out.write_text(json.dumps(largest))


def _locate(samples: list[Any], different: Any) -> None:
    """Print where log-probs differ: a pattern in positions points to an operation that depends on the shape of a step."""
    if not different.any():
        return
    positions, start = [], 0
    for sample in samples:
        prompt, count = len(sample.prompt_ids), len(sample.response_ids)
        positions += [(index, prompt + index) for index in range(count) if different[start + index]]
        start += count
    first = sum(index == 0 for index, _ in positions)
    say(
        f"    of these, {first} are first tokens (computed in prefill); contexts from {min(at for _, at in positions)} to "
        f"{max(at for _, at in positions)}; in {sum(1 for index, _ in positions if index > 0)} decoded positions"
    )


def run_trainer(options: argparse.Namespace) -> None:
    """Time of a forward and backward pass of 8,192 packed tokens, in both modes."""
    import torch

    from harness import parser  # noqa: F401
    from mtpctl.bench.train_step import samples, synchronize
    from mtpctl.trainer.objective import NextToken

    medians = {}
    for numerics in ("bitwise", "default"):
        trainer = _trainer(options, numerics, random_seed=0)
        try:
            batch, times, losses = samples(trainer.folder.shape.vocab, 8192, 10, 0.33), [], []
            for _ in range(5):
                synchronize(trainer.device)
                began = time.perf_counter()
                losses.append(trainer.forward_backward(batch, NextToken())["sft/loss"])
                synchronize(trainer.device)
                times.append(1000 * (time.perf_counter() - began))
            medians[numerics] = statistics.median(times[2:])
            say(f"  trainer, {numerics}: forward and backward {medians[numerics]:.0f} ms for 8,192 tokens, loss {losses[-1]:.6f}")
        finally:
            trainer.close()
            del trainer
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    say(f"  trainer: ratio {medians['default'] / medians['bitwise']:.2f} of the default's speed (bound 0.85)")


def run_mismatch(options: argparse.Namespace) -> None:
    """`mtpctl doctor --mismatch` for the small model."""
    from mtpctl.doctor.mismatch import examine_mismatch
    from mtpctl.recipe.loading import load_recipe

    cuda = options.device == "cuda"
    sets = [
        "model.init=weights",
        "model.config=null",
        f"model.path={options.folder}",
        f"run_dir={options.out / 'run'}",
        "rollout.speculation.num_tokens=1",
    ]
    sets += ["rollout.eager=true", "numerics=bitwise", "mtp.mode=isolated", "rollout.max_tokens=96"]
    if cuda:
        sets += ["cluster.device=cuda", "sync.transport=nccl", "train.precision=bf16", "rollout.gpu_memory=0.3"]
    recipe = load_recipe("tiny_mtp", sets=sets).recipe
    file = options.out / "recipe.yaml"
    file.write_text(recipe.model_dump_json(by_alias=True, exclude_unset=True))  # JSON is YAML
    result = examine_mismatch(str(file))
    for module in result.modules:
        say(
            f"  {result.label(module.name):28} same inputs: mean {module.mean:.1e}, worst {module.worst:.1e}; "
            f"own inputs: {module.total:.1e}; prefill against decoding: {module.prefill:.1e}"
        )
    for line in result.logprobs:
        say(f"  {line.source:28} log-probs: mean {line.mean:.1e}, largest {line.largest:.1e}")
    say(f"  verdict: {result.verdict}")


CHILDREN = {"folder": create_folder, "engine": run_engine, "score": run_score, "trainer": run_trainer, "mismatch": run_mismatch}

if __name__ == "__main__":
    main()
