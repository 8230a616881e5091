"""The `mtpctl` command: its subcommands, and how errors become one line and an exit code."""

from __future__ import annotations

import signal
import sys
import traceback
import warnings
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer.core import TyperGroup

from mtpctl.cli import (
    bench,
    clean,
    convert_hf,
    doctor,
    evaluate,
    init,
    logprob_serve,
    recipe,
    report,
    rollout,
    runs,
    samples,
    sync_weights,
    train,
)
from mtpctl.cli.answers import answer
from mtpctl.errors import MtpctlError

if TYPE_CHECKING:
    from typer._click import Context

INTERRUPTED = 130
ANYWHERE = ("--debug", "--verbose", "-v")
"""Options that may stand anywhere on the line. With any of them, warnings that are known to be idle are shown too."""


class _Commands(TyperGroup):
    """Prints errors of this package in one line. The parser itself reports mistakes on the command line, with exit code 2."""

    def invoke(self, ctx: Context) -> object:
        # A scheduler's SIGTERM ends a command as Ctrl-C does, with everything that it has started.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            return super().invoke(ctx)
        except MtpctlError as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            print(f"error: {error}", file=sys.stderr)
            for note in getattr(error, "__notes__", ()):
                print(f"also: {note}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from error
        finally:
            signal.signal(signal.SIGTERM, before)


app = typer.Typer(
    name="mtpctl",
    cls=_Commands,
    help="Asynchronous RL post-training for language models that carry multi-token-prediction heads.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Its panels cost 0.2 s at every start.
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        answer(f"mtpctl {version('mtpctl')}")
        raise typer.Exit()


@app.callback()
def _everywhere(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. May stand anywhere on the line.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what libraries log, and their warnings. May stand anywhere on the line.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    # `_Commands` reads --debug; this declares it to the parser, and for --help.
    if verbose:
        import logging

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)


app.command("init")(init.init)
app.command("train")(train.train)
app.command("rollout")(rollout.rollout)
app.command("eval")(evaluate.evaluate)
app.command("logprob-serve")(logprob_serve.logprob_serve)
app.command("convert-hf")(convert_hf.convert_hf)
app.command("report")(report.report)
app.command("runs")(runs.runs)
app.command("samples")(samples.samples)
app.command("sync-weights")(sync_weights.sync_weights)
app.command("doctor")(doctor.doctor)
app.command("clean")(clean.clean)
app.add_typer(bench.app, name="bench")
app.add_typer(recipe.app, name="recipe")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Exit codes: those of `mtpctl.errors`, 2 for a wrong command line, 130 after Ctrl-C or SIGTERM, 1 for a bug, with its traceback.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    asked = [option for option in ANYWHERE if option in arguments]
    arguments = [*asked, *(argument for argument in arguments if argument not in ANYWHERE)]
    if not asked:
        # megatron-core warns at import of optional packages that are missing. Warnings of its compiled code name a path, not a module.
        warnings.filterwarnings("ignore", module=r"(.*/)?megatron[./]")
        # torch warns of its own ways at every tensor that it reads from a checkpoint, and in names of files where a decorator is between.
        warnings.filterwarnings("ignore", module=r"(.*/)?torch[./]distributed[./]checkpoint[./]")
    app(arguments, prog_name="mtpctl")
    raise AssertionError("a command line ends by exiting")
