"""`mtpctl convert-hf` and `mtpctl add-drafter`: convert a model between formats, or add a drafter to it."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from mtpctl.cli.options import Json, Sets, print_result
from mtpctl.errors import UserError
from mtpctl.jobs import print_progress

TENTHS = 10
DTYPES = ("fp32", "bf16", "fp16", "fp8")
FORMATS = ("megatron", "hf")


def convert_hf(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A Hugging Face folder, a Megatron checkpoint, or a run directory.")],
    target: Annotated[Path | None, typer.Argument(metavar="DST", help="The folder to create.")] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="megatron|hf", help="Format of DST; inferred from SRC by default.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="fp32|bf16|fp16|fp8",
            help="Dtype of the weights; default: as in SRC. fp8 only if DST is a Hugging Face folder.",
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FOLDER", help="The model folder, for a checkpoint that does not name one.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every tensor, and logits and MTP logits on a fixed prompt.")] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="For an adapter: write the model with the adapter merged in, not a PEFT folder.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace DST, once its replacement is complete.")] = False,
    inspect: Annotated[
        bool, typer.Option("--inspect", help="Print the contents of SRC and its missing files; DST must be omitted.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert weights, MTP layers included, one parameter at a time. DST is renamed into place when it is complete."""
    for name, value, known in (("--to", to, FORMATS), ("--dtype", dtype, DTYPES)):
        if value is not None and value not in known:
            raise UserError(f"{name}: {value!r} is not one of {', '.join(known)}")
    if inspect == (target is not None):
        raise UserError("--inspect takes no DST" if inspect else "DST is missing; name the folder to create")
    if not source.is_dir():
        raise UserError(f"{source}: there is no such folder")
    # A conversion needs no GPU, and must not allocate memory on one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if logging.root.level > logging.INFO:  # without -v
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns if there is no GPU
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if target is None:
        from mtpctl.convert.source import inspect as inspect_source

        contents = inspect_source(source, model)
        print_result(json.dumps(contents, indent=2) if as_json else _list(contents))
        return
    from mtpctl.convert.hf_folder import check_target

    check_target(source, target, force=force)  # before torch is imported, which takes seconds
    from mtpctl.cluster.process import gc_paused_for_imports

    with gc_paused_for_imports():
        from mtpctl.convert.conversion import ConversionOptions, convert

    options = ConversionOptions(to, dtype, model, verify, force, merge)  # type: ignore[arg-type]
    with _progress() as progress:
        result = convert(source, target, options, report=lambda line: print(line, file=sys.stderr), progress=progress)
    if as_json:
        print_result(json.dumps(asdict(result), indent=2))
        return
    kind = "Megatron checkpoint" if result.to == "megatron" else "Hugging Face folder"
    rate = result.nbytes / result.seconds / 1e6
    print_result(
        f"{target}: {kind} of {result.tensors} tensors, {result.nbytes / 1e9:,.2f} GB in {result.seconds:.1f} s ({rate:,.0f} MB/s)"
    )
    if result.verified is not None:
        drafts = "" if result.verified.max_mtp_logit_diff is None else f", MTP logits by {result.verified.max_mtp_logit_diff:.1e}"
        error = result.verified.relative_error
        quantized = "" if error is None else f" after quantization, relative error up to {error:.1e}"
        print_result(
            f"verified: {result.verified.num_tensors} tensors bit-equal{quantized}; "
            f"logits differ by {result.verified.max_logit_diff:.1e}{drafts}"
        )


def _list(contents: Mapping[str, object]) -> str:
    lines = [f"{name:14} {', '.join(map(str, value)) if isinstance(value, list) else value}" for name, value in contents.items()]
    return "\n".join(lines)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows progress: a bar with bytes, speed and remaining time on a terminal, else a line at every tenth."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        printed = 0

        def show(done: int, total: int) -> None:
            nonlocal printed
            if (tenth := TENTHS * done // max(1, total)) > printed:
                printed = tenth
                size, unit = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
                print(f"{done / size:,.2f} of {total / size:,.2f} {unit}", file=sys.stderr)

        yield show
        return
    with Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def add_drafter(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Hugging Face folder of the model.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to create: a copy of the model with the drafter.")],
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE", help="Rows with a column `prompt`: .jsonl, .json, .parquet. Required unless --steps is 0."),
    ] = None,
    kind: Annotated[
        Literal["mtp", "eagle3", "dflash"] | None,
        typer.Option(
            "--kind",
            help="mtp: MTP layers of the model's architecture; eagle3: an EAGLE-3 drafter; dflash: a DFlash drafter, which drafts all "
            "tokens in one pass. Default: mtp if vLLM supports MTP layers with the model's trunk, else eagle3.",
        ),
    ] = None,
    layers: Annotated[
        int, typer.Option("--layers", min=1, help="MTP layers to add (a single one drafts all tokens), or layers of the DFlash drafter.")
    ] = 1,
    samples: Annotated[
        int,
        typer.Option(
            "--self-generate",
            metavar="N",
            min=0,
            help="Responses to generate with the model and train on; 0: train on the responses of the rows (a column `answer`).",
        ),
    ] = 16384,
    steps: Annotated[int, typer.Option("--steps", min=0, help="Updates of the drafter; 0: leave it untrained.")] = 1000,
    drafts: Annotated[int, typer.Option("--drafts", metavar="K", min=1, help="Draft tokens per step that the drafter is trained for.")] = 3,
    loss: Annotated[
        Literal["ce", "soft_ce", "kl", "tv", "e2e_tv"], typer.Option("--loss", help="Loss of the drafter (mtp.loss).")
    ] = "soft_ce",
    sets: Sets = None,
    plain: Annotated[bool, typer.Option("--plain", help="One line a step instead of the live panel.")] = False,
) -> None:
    """Add a drafter to a model, and train it on the model's own samples. The model's weights stay bit-identical.

    If it is interrupted, the same command resumes the run. --set changes the run's recipe, for example rollout.temperature=0.7.
    """
    from mtpctl.jobs.add_drafter import DrafterOptions, engine_commands
    from mtpctl.jobs.add_drafter import add_drafter as run

    if kind != "dflash" and layers > 1 and drafts > layers:
        raise UserError(f"--drafts: {drafts} draft tokens need one layer that repeats, or {drafts} layers; --layers is {layers}")
    options = DrafterOptions(kind, layers, data, samples, steps, drafts, loss, sets or ())
    code = run(source, target, options, plain=plain, report=print_progress)
    if not code:
        commands = engine_commands(target, drafts)
        which = "one of these commands" if len(commands) > 1 else "this command"
        print_result(f"{target}: the model with its drafter; serve it with {which}:")
        for command in commands:
            print_result(f"  {command}")
    raise typer.Exit(code)
