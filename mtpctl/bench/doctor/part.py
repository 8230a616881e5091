"""Run one part of the examination in a process of its own: `python -m mtpctl.bench.doctor.part NAME FOLDER`.

A part writes `NAME.json` into the folder; its output goes to `NAME.log`. In a process of its own a part may hang, crash or
patch torch without an effect on the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from mtpctl.errors import EnvironmentMissing, MtpctlError, RuntimeFailure, UserError
from mtpctl.telemetry.run_directory import write_whole

PARTS = {"kernels": "live", "transports": "live", "ray": "live", "families": "live", "sample": "self_check", "score": "self_check"}
"""Name of each part, and the module that holds the function of that name."""
_ERRORS = {error.exit_code: error for error in (UserError, EnvironmentMissing, RuntimeFailure)}


class NoAnswer(RuntimeFailure):
    """A part took longer than it may."""


async def run_part(name: str, folder: Path, deadline_s: float) -> dict[str, Any]:
    """Run a part and return what it found.

    Raises the project's own errors as the part raised them, RuntimeFailure with its last line where it crashed, and NoAnswer where it
    took longer than `deadline_s`; no process of it is left behind.
    """
    log, result = folder / f"{name}.log", folder / f"{name}.json"
    with log.open("wb") as out:
        command = (sys.executable, "-m", "mtpctl.bench.doctor.part", name, str(folder))
        # A session of its own, so that whatever the part started can be ended with it.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = await asyncio.wait_for(process.wait(), deadline_s)
        except TimeoutError:
            raise NoAnswer(f"{name}: no answer within {deadline_s:g} s") from None
        finally:
            with suppress(ProcessLookupError):  # The whole group has ended by itself.
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if not result.exists():
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise RuntimeFailure(f"{name}: ended with code {code}: {lines[-1] if lines else 'it printed nothing'}")
    told: dict[str, Any] = json.loads(result.read_text())
    if "error" in told:
        raise _ERRORS.get(told["exit_code"], RuntimeFailure)(told["error"])
    return told


def main(name: str, folder: Path) -> None:
    """Run one part in this process and write its result. An error that is not the project's own ends the process with its traceback."""
    part: Callable[[Path], dict[str, object]] = getattr(import_module(f"mtpctl.bench.doctor.{PARTS[name]}"), name)
    try:
        told = part(folder)
    except MtpctlError as error:
        told = {"error": str(error), "exit_code": error.exit_code}
    write_whole(folder / f"{name}.json", json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
