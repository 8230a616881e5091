"""`mtpctl bench`: benchmarks with bounds. Those of single components are here; those of whole runs are in `bench_experiments`."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mtpctl.cli import bench_experiments
from mtpctl.cli.options import Json, create_folder, print_result
from mtpctl.jobs import print_progress

if TYPE_CHECKING:
    from mtpctl.recipe.model import MtpConfig

app = typer.Typer(
    help="Measure throughput, latency, memory and learning.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)
Model = Annotated[
    str,
    typer.Option("--model", help="Model folder, or hub id whose config mtpctl knows; weights are random. Default on a GPU: MiMo-7B."),
]
_MIB = 1 << 20


@app.callback()
def _group() -> None:
    # Typer makes `mtpctl bench` a group only if it has a callback.
    pass


@app.command("fused-kernels")
def fused_kernels(
    shape: Annotated[list[str] | None, typer.Option("--shape", metavar="ROWSxHIDDENxVOCAB", help="May be repeated.")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Measure other packages too, if they are installed.")] = False,
    json: Json = False,
) -> None:
    """Log-probs and policy loss from hidden states: time and memory of each kernel. Exit code 6 if a bound is missed."""
    import torch

    from mtpctl.bench import fused_kernels as bench
    from mtpctl.bench.report import render
    from mtpctl.errors import UserError

    default = "8192x4096x151680" if torch.cuda.is_available() else "64x64x1000"
    try:
        shapes = [bench.Shape.parse(text) for text in shape or [default]]
    except ValueError as error:
        raise UserError(str(error)) from error
    results = [result for problem_shape in shapes for result in bench.measure(problem_shape, with_peers=peers)]
    print_result(render(bench.to_document(results), bench.format_table(results), as_json=json))
    if not json:
        print_result("\n".join(["", *bench.format_verdict(results)]))
    _check([f"{r.what} {r.name}: {miss}" for r in results for miss in r.misses])


@app.command("train-step")
def train_step(
    model: Model = "",
    tokens: Annotated[int, typer.Option("--tokens", min=64, help="Packed tokens of the step.")] = 8192,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Number of samples of equal length that fill --tokens.")] = 8,
    prompt_share: Annotated[float, typer.Option("--prompt-share", min=0, max=0.9, help="Share of each sample that is prompt.")] = 0.25,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option("--precision")] = "bf16",
    layers: Annotated[int, typer.Option("--layers", min=0, help="Number of decoder layers; 0: all.")] = 0,
    mtp: Annotated[str, typer.Option("--mtp", help="mtp.mode: off, joint or isolated.")] = "isolated",
    recompute: Annotated[Literal["none", "selective", "full"], typer.Option("--recompute")] = "none",
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks, with sequence parallelism.")] = 1,
    cp: Annotated[int, typer.Option("--cp", min=1, help="Context-parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Expert-parallel ranks, which share the samples.")] = 1,
    json: Json = False,
) -> None:
    """Time the forward and backward pass of an update with MTP. On one device, three LM heads are compared: one pass for losses and
    gradients, one for log-probs and another for gradients, and materialized logits. With several ranks, only the first is measured."""
    from mtpctl.compat import cpu_device
    from mtpctl.errors import UserError
    from mtpctl.recipe.model import MtpConfig

    if tokens < 4 * samples:
        raise UserError(f"--samples: {tokens} tokens are too few for {samples} samples of prompt and response; at most {tokens // 4} fit")
    mtp_config = _mtp_config(mtp)
    cpu_device.install()  # before Megatron is imported
    from mtpctl.bench import train_step as bench
    from mtpctl.bench.report import describe_machine, render

    config = bench.load_named_config(model)
    with tempfile.TemporaryDirectory() as scratch:
        config, note = bench.extend_positions(bench.truncate_layers(config, layers) if layers else config, tokens // samples)
        if note and not json:
            typer.echo(note)
        folder = bench.create_config_folder(config, Path(scratch))
        if not folder.shape.mtp_layers:
            mtp_config = MtpConfig(mode="off")
        parallel = bench.make_layout(tp, cp, ep, folder)
        workload = bench.Workload(tokens, samples, prompt_share, precision, mtp_config, recompute)
        results, matmul_tflops = bench.measure(folder, parallel, workload)
    options = {"model": model, "layers": layers, "tp": tp, "cp": cp, "ep": ep} | asdict(workload) | {"mtp": mtp_config.mode}
    print_result(
        render(
            bench.to_document(results, matmul_tflops, describe_machine(), options),
            bench.format_table(parallel, results, matmul_tflops),
            as_json=json,
        )
    )


@app.command("rollout")
def rollout(
    shape: Annotated[str, typer.Option("--shape", help="mimo7b, or tiny for a CPU.")] = "",
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="FOLDER",
            help="Folder with your model and its tokenizer, for which mtpctl's pool is compared with vLLM alone; or a folder for the "
            "benchmark's own model. Default: a temporary one.",
        ),
    ] = None,
    engines: Annotated[
        int, typer.Option("--engines", min=1, help="With --model: number of engines that share the GPU; one engine alone is measured too.")
    ] = 1,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="With --model: file with a prompt per line; default: random tokens.")
    ] = None,
    part: Annotated[list[str] | None, typer.Option("--part", metavar="path|speculation", help="Only this part; default: both.")] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="Concurrent requests; default: 8, 64, 256; for your model 256 (CPU: 8)."),
    ] = None,
    drafts: Annotated[int, typer.Option("--drafts", min=1, max=8, help="Largest number of draft tokens a step; not for your model.")] = 3,
    acceptance: Annotated[float, typer.Option("--acceptance", min=0, max=1, help="Share of accepted drafts; not for your model.")] = 0.75,
    prompt_tokens: Annotated[int, typer.Option("--prompt", min=2, help="Prompt tokens.")] = 128,
    response_tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            min=8,
            help="Response tokens; default: 256 (tiny: 192); for your model their mean, 256 (CPU: 32).",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measured rounds, after a warm-up round.")] = 3,
    eager: Annotated[bool, typer.Option("--eager", help="No compilation and no CUDA graphs.")] = False,
    json: Json = False,
) -> None:
    """Compare tokens/s of mtpctl's pool with vLLM alone and, for the benchmark's own model, of k drafts with none. Exit code 6 if a bound
    is missed; your model has none."""
    from mtpctl.errors import UserError

    if model is not None and _is_users_model(model):
        if shape or part:
            raise UserError(f"--{'shape' if shape else 'part'}: applies to the benchmark's own model, not to {model}; leave it out")
        return _rollout_of_model(model, batch or [], engines, prompts, prompt_tokens, response_tokens or 0, rounds, eager=eager, json=json)
    if engines > 1 or prompts is not None:
        raise UserError(f"--{'engines' if engines > 1 else 'prompts'}: needs --model with your model's folder")
    parts = part or ["path", "speculation"]
    for name in parts:
        if name not in ("path", "speculation"):
            raise UserError(f"--part: must be path or speculation, got {name}")
    import torch

    from mtpctl.bench import rollout as bench
    from mtpctl.bench.report import describe_machine, format_environment, to_json

    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    shape_name = bench.parse_shape(shape or ("mimo7b" if device == "cuda" else "tiny"))
    if shape_name == "mimo7b" and device == "cpu":
        raise UserError("--shape: mimo7b has 7.8 billion parameters, which need a GPU; use tiny")

    show = partial(print, flush=True)
    with tempfile.TemporaryDirectory(prefix="mtpctl-bench-") as scratch:
        options = bench.Options(
            shape=shape_name,
            folder=Path(scratch) / "model" if model is None else create_folder(model, "--model"),
            batches=tuple(sorted(set(batch or (8, 64, 256)))),
            prompt=prompt_tokens,
            tokens=response_tokens or (192 if shape_name == "tiny" else 256),
            drafts=drafts,
            acceptance=acceptance,
            rounds=rounds,
            device=device,
            eager=eager,
        )
        show(f"{format_environment(describe_machine())}\nThe timer covers: {bench.TIMED_WORK}.\n{bench.HEADINGS}\n{bench.RULE}")
        results = bench.run_benchmark(options, parts, show)
    for line in bench.format_verdict(results):
        show(line)
    if json:
        print_result(to_json({"environment": describe_machine(), **bench.to_document(options, results)}))
    _check([f"{r.what}, {r.load}: {miss}" for r in results for miss in r.misses])


def _is_users_model(folder: Path) -> bool:
    """Whether the folder contains a model that the benchmark did not write."""
    config = folder / "config.json"
    return config.is_file() and "mtpctl_cycle" not in config.read_text()


def _rollout_of_model(
    folder: Path,
    batches: list[int],
    engines: int,
    prompts: Path | None,
    prompt_tokens: int,
    response_tokens: int,
    rounds: int,
    *,
    eager: bool,
    json: bool,
) -> None:
    """Measure the rollout of a user's model through mtpctl's pool and through vLLM alone."""
    import torch

    from mtpctl.bench import rollout_model as bench
    from mtpctl.bench.report import describe_machine, format_environment, to_json
    from mtpctl.errors import UserError

    texts: list[str] = []
    if prompts is not None:
        try:
            texts = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompts: {prompts} cannot be read ({error})") from error
        if not texts:
            raise UserError(f"--prompts: {prompts} has no prompt; write one per line")
    cuda = torch.cuda.is_available()
    options = bench.Options(
        folder,
        "cuda" if cuda else "cpu",
        prompt_tokens,
        response_tokens or (256 if cuda else 32),
        rounds=rounds,
        prompts=tuple(texts),
        eager=eager,
    )
    show = partial(print, flush=True)
    arms = bench.default_arms(sorted(set(batches)) or [256 if cuda else 8], engines)
    show(format_environment(describe_machine()))
    results = bench.run_benchmark(options, arms, show)
    if json:
        print_result(to_json({"environment": describe_machine(), **bench.to_document(options, results)}))


@app.command("sync-weights")
def sync_weights(
    transport: Annotated[
        list[str] | None, typer.Option("--transport", help="May be repeated; default: nccl and ipc; ipc with --shared; shm on a CPU.")
    ] = None,
    shared: Annotated[bool, typer.Option("--shared", help="Trainer and engine on one GPU (ipc, shm).")] = False,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Measured syncs over each transport.")] = 3,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests in flight, at most 16 on a CPU.")] = 64,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt", min=1, help="Prompt tokens of a request; default: 256, 16 on a CPU.")
    ] = None,
    response_tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Response tokens of a request; default: 2048, 200 on a CPU.")
    ] = None,
    bucket: Annotated[int | None, typer.Option("--bucket-mib", min=1, help="Size of a bucket in MiB; default: 1024, 16 on a CPU.")] = None,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="Quantize linear layers to FP8 (rollout.quantization). The bound for a sync is then 0.09 s.")
    ] = False,
    eager: Annotated[bool, typer.Option("--eager", help="No compilation and no CUDA graphs: the engine starts sooner.")] = False,
    json: Json = False,
) -> None:
    """Sync weights from a trainer to an engine under load: time of the transfer and of the whole sync, stall, memory. Exit code 6 if a
    bound is missed."""
    from mtpctl.errors import PrerequisiteMissing, UserError
    from mtpctl.recipe.sync import TRANSPORTS

    for name in transport or ():
        if name == "storage":
            raise UserError("--transport: storage is not supported, because its speed depends on the object store; choose another")
        if name not in TRANSPORTS:
            raise UserError(f"--transport: must be one of {', '.join(each for each in TRANSPORTS if each != 'storage')}, got {name}")
        if shared and TRANSPORTS[name].one_process_per_gpu:
            raise UserError(f"--transport: {name} does not support two processes on a GPU; with --shared measure another")
    import asyncio

    import torch

    from mtpctl.bench import sync_weights as bench
    from mtpctl.bench.report import describe_machine, render
    from mtpctl.families.configs import hub_config
    from mtpctl.recipe.loading import load_recipe

    cuda = torch.cuda.is_available()
    transports = transport or ((["ipc"] if shared else ["nccl", "ipc"]) if cuda else ["shm"])
    if not cuda and (cuda_transports := [name for name in transports if TRANSPORTS[name].cuda]):
        raise PrerequisiteMissing(f"--transport: {cuda_transports[0]} needs CUDA; on a CPU measure shm")
    if fp8 and not cuda:
        raise PrerequisiteMissing("--fp8: needs CUDA; a CPU measures the tiny model, whose matrices do not fit blocks of 128 x 128")
    if cuda and not shared and torch.cuda.device_count() < 2:
        raise PrerequisiteMissing("two GPUs are needed, this machine has one; with --shared trainer and engine share it")
    tiny = load_recipe("tiny_mtp").recipe.model.config
    assert tiny is not None

    with tempfile.TemporaryDirectory(prefix="mtpctl-bench-") as scratch:
        options = bench.Options(
            config=hub_config("XiaomiMiMo/MiMo-7B-RL") if cuda else tiny,
            device="cuda" if cuda else "cpu",
            transports=tuple(transports),
            repeats=repeats,
            batch=batch if cuda else min(batch, 16),
            prompt=prompt_tokens or (256 if cuda else 16),
            tokens=response_tokens or (2048 if cuda else 200),
            bucket_bytes=(bucket or (1024 if cuda else 16)) * _MIB,
            fp8=fp8,
            eager=eager,
            shared=shared,
            folder=Path(scratch),
        )
        results = asyncio.run(bench.measure(options, print_progress))
    tables = f"{bench.format_table(results)}\n\n{bench.format_phases(results)}"
    print_result(render(bench.to_document(results, describe_machine(), options.as_json), tables, as_json=json))
    _check([f"{result.transport}: {miss}" for result in results for miss in result.misses])


@app.command("logprob")
def logprob(
    model: Annotated[
        str,
        typer.Option(
            "--model", help="Model folder, or hub id whose config mtpctl knows; weights are random. Default: MiMo-7B, or a toy on a CPU."
        ),
    ] = "",
    precision: Annotated[str, typer.Option("--precision", help="fp32 or bf16; default: bf16 on a GPU.")] = "",
    lengths: Annotated[
        str, typer.Option("--lengths", metavar="MIN:MAX", help="Tokens of a request; default: 512:4096, on a CPU 64:512.")
    ] = "",
    in_flight: Annotated[int, typer.Option("--in-flight", min=1, help="Concurrent requests.")] = 64,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests of one round.")] = 128,
    rounds: Annotated[int, typer.Option("--rounds", min=1)] = 3,
    tokens_per_batch: Annotated[
        int | None, typer.Option("--tokens-per-batch", min=64, help="logprob.tokens_per_batch; default: 16384, on a CPU 2048.")
    ] = None,
    json: Json = False,
) -> None:
    """Tokens/s, latency and memory of the log-prob server, against its engine alone. Exit code 6 if a bound is missed."""
    import asyncio

    from mtpctl.errors import UserError

    if precision not in ("", "fp32", "bf16"):
        raise UserError(f"--precision: {precision} is neither fp32 nor bf16")
    import torch

    from mtpctl.bench.report import describe_machine, render
    from mtpctl.recipe.schema import ClusterConfig

    cuda = torch.cuda.is_available()
    precision = precision or ("bf16" if cuda else "fp32")
    try:
        shortest, longest = (int(part) for part in (lengths or ("512:4096" if cuda else "64:512")).split(":"))
    except ValueError:
        raise UserError(f"--lengths: {lengths} is not MIN:MAX, such as 512:4096") from None
    from mtpctl.bench import logprob as bench
    from mtpctl.bench.train_step import create_config_folder, load_named_config
    from mtpctl.cluster.local import cluster

    config = load_named_config(model) if model or cuda else bench.TOY
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = create_config_folder(config, Path(scratch) / "model")
        positions = folder.shape.max_positions
        if not 2 <= shortest <= longest <= positions:
            raise UserError(f"--lengths: {shortest}:{longest} must be MIN:MAX between 2 and the model's {positions} positions")
        workload = bench.Workload(
            (shortest, longest),
            in_flight=in_flight,
            requests=requests,
            rounds=rounds,
            single=min(512, positions),
            tokens_per_batch=tokens_per_batch or (16384 if cuda else 2048),
        )
        stack.enter_context(cluster(ClusterConfig(), cpus=0, gpus=float(cuda)))
        report = asyncio.run(bench.measure(folder.path, precision, workload, Path(scratch), gpus=float(cuda)))
    print_result(render(bench.to_document(report, describe_machine(), workload), bench.format_table(report), as_json=json))
    _check([f"{f.what}: {f.value:.3g}, bound {f.bound:.3g}" for f in report.findings if f.missed])


def _check(misses: list[str]) -> None:
    """Raise ThresholdMissed if a bound was missed."""
    from mtpctl.errors import ThresholdMissed

    if misses:
        raise ThresholdMissed(f"{len(misses)} bound(s) missed, first: {misses[0]}")


def _mtp_config(mode: str) -> MtpConfig:
    from pydantic import ValidationError

    from mtpctl.errors import UserError
    from mtpctl.recipe.model import MtpConfig

    try:
        return MtpConfig.model_validate({"mode": mode})
    except ValidationError as error:
        raise UserError(f"--mtp: must be off, joint or isolated, got {mode}") from error


app.command("mtp")(bench_experiments.mtp)
app.command("async")(bench_experiments.asynchrony)
app.command("compare")(bench_experiments.compare)
