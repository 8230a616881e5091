"""The `mtpctl` command: its subcommands, the one-line errors with exit codes, and its role as process 1 of a container."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from mtpctl.cli.options import print_result
from mtpctl.errors import MtpctlError
from mtpctl.signals import exit_code, raising_on_stop

if TYPE_CHECKING:
    from typer._click import Command, Context

COMMANDS = {
    "init": ("recipe:init", "Create a custom task that trains without changes."),
    "train": ("train:train", "Train by a recipe, or resume a run."),
    "launch": ("train:launch", "Run a recipe as a job of Slurm or Kubernetes."),
    "rollout": ("rollout:rollout", "Generate responses to a file of prompts with the latest weights."),
    "eval": ("rollout:evaluate", "Evaluate a run on its held-out sets."),
    "logprob-serve": ("rollout:logprob_serve", "Serve log-probs, entropy and MTP scores over HTTP."),
    "add-drafter": ("convert_hf:add_drafter", "Add a drafter to a model without one, and train it."),
    "convert-hf": ("convert_hf:convert_hf", "Convert weights, Hugging Face to Megatron and back."),
    "report": ("runs:report", "Write an HTML page of one run or of several."),
    "runs": ("runs:runs", "List the runs below a folder."),
    "status": ("runs:status", "Show the state of a run."),
    "scale": ("runs:scale", "Change the rollout replicas of a running run."),
    "samples": ("runs:samples", "Print responses of the model."),
    "sync-weights": ("rollout:sync_weights", "Sync weights to engines manually, and time it."),
    "doctor": ("doctor:doctor", "Check versions, devices and log-probs."),
    "clean": ("runs:clean", "Remove what killed runs left on this machine."),
    "bench": ("bench:app", "Measure throughput, latency, memory and learning."),
    "recipe": ("recipe:app", "List, show, check and compare recipes."),
}
"""Each command: its module and function, imported on use, and its line in the list of commands."""

GLOBAL_OPTIONS = ("--debug", "--verbose", "-v")
"""Options that may appear anywhere on the line. Each of them also shows warnings that are known to be harmless."""


class _Commands(TyperGroup):
    """Imports a command on use, and prints errors of this package in one line. The parser reports its own errors, with exit code 2."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # Placeholders for the list of commands, and for suggestions for misspelled names. `resolve_command` imports the actual command.
        self.commands = {name: TyperCommand(name, short_help=line) for name, (_, line) in COMMANDS.items()}

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, _import_command(name) if name and command else None, rest

    def invoke(self, ctx: Context) -> object:
        # SIGTERM and a closed terminal end a command and its child processes, as Ctrl-C does.
        with raising_on_stop():
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
                raise typer.Exit(exit_code(getattr(error, "number", signal.SIGINT))) from error


def _import_command(name: str) -> Command:
    module, _, attribute = COMMANDS[name][0].partition(":")
    command = getattr(import_module(f"mtpctl.cli.{module}"), attribute)
    if isinstance(command, typer.Typer):
        return typer.main.get_command(command)
    group = typer.Typer(add_completion=False, rich_markup_mode=None)
    group.command(name)(command)
    return typer.main.get_command(group)


app = typer.Typer(
    name="mtpctl",
    cls=_Commands,
    help="Asynchronous RL post-training for language models that carry multi-token-prediction heads.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Importing rich takes 0.2 s.
)


def _version(requested: bool) -> None:
    if requested:
        from mtpctl.telemetry.versions import installed_packages

        packages = installed_packages()
        print_result(f"mtpctl {packages.pop('mtpctl')}")
        print_result(" · ".join([f"Python {sys.version.split()[0]}", *(f"{name} {version}" for name, version in packages.items())]))
        raise typer.Exit()


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. Accepted anywhere on the line.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show log messages and warnings of libraries. Accepted anywhere on the line.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions of mtpctl and its stack.")
    ] = False,
) -> None:
    # `_Commands` reads --debug; it is declared here for the parser and --help.
    if verbose:
        import logging

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Exit codes: those of `mtpctl.errors`; 2 for a wrong command line; 1 for a bug, with its traceback. After a stop signal: 128 plus the
    signal's number (130 for Ctrl-C).
    """
    if os.getpid() == 1:
        fork_command()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = [option for option in GLOBAL_OPTIONS if option in arguments]
    arguments = [*options, *(argument for argument in arguments if argument not in GLOBAL_OPTIONS)]
    if not options:
        # megatron-core warns of missing optional packages. Warnings of its compiled code name a path instead of a module.
        warnings.filterwarnings("ignore", module=r"(.*/)?megatron[./]")
        # torch warns about its own deprecated calls for every tensor that it reads from a checkpoint.
        warnings.filterwarnings("ignore", module=r"(.*/)?torch[./]distributed[./]checkpoint[./]")
    app(arguments, prog_name="mtpctl")
    raise AssertionError("app() always exits")


FORWARDED_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)
REAP_TIMEOUT_S = 10.0
"""Seconds to wait for the other processes of the container after the command has ended."""
_POLL_S = 0.05


def fork_command() -> None:
    """Run the command in a child process, because this process is process 1 of a container. Returns in the child.

    The kernel discards signals for which process 1 has no handler. If the command were process 1 and hung on exit, a second SIGTERM would
    not end it, because `raising_on_stop` restores the previous handlers after the first one. Orphaned processes become children of process
    1, and remain zombies until it waits for them. So process 1 only forwards signals, reaps children, and exits with the command's exit
    code.
    """
    wait_signals = {*FORWARDED_SIGNALS, signal.SIGCHLD}
    signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*wait_signals, signal.SIGTTOU})
    command = os.fork()
    if not command:
        _become_group_leader()
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        return
    code = None
    while code is None:
        number = signal.sigwait(wait_signals)
        if number == signal.SIGCHLD:
            code = _reap(command)
        else:
            with suppress(ProcessLookupError):
                os.kill(command, number)
    # The command's `cluster.leftovers.Watchdog`, which ends Ray's daemons after the command, may still be running.
    deadline = time.monotonic() + REAP_TIMEOUT_S
    while _reap_one() is not None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    sys.stdout.flush()
    os._exit(code)


def _become_group_leader() -> None:
    """Become the leader of a process group, in the foreground if there is a terminal.

    Each signal then reaches the command once. Ctrl-C comes from the terminal, which does not signal process 1 then; other signals are
    forwarded by process 1.
    """
    os.setpgid(0, 0)
    with suppress(OSError):  # no terminal, or one of another session
        os.tcsetpgrp(0, os.getpgid(0))


def _reap(command: int) -> int | None:
    """Reap all children that have ended. Returns the exit code of the command if it is among them, else None."""
    code = None
    while (child := _reap_one()) is not None and child[0]:
        if child[0] == command:
            code = os.waitstatus_to_exitcode(child[1])
    return code if code is None or code >= 0 else exit_code(-code)


def _reap_one() -> tuple[int, int] | None:
    """The id and status of a child that has ended; (0, 0) if all are running, None if there are no children."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
