"""Commands other than `train` that start Ray: a signal to the process group ends them with all that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mtpctl.cluster.leftovers import SHARED_MEMORY
from mtpctl.signals import exit_code
from tests.environment import with_tree
from tests.fakes.processes import runs
from tests.fakes.runs import SMALL, run, write_prompts

__all__ = ["run"]

END_S = 60.0


def titles(process: psutil.Process) -> str:
    """The command lines of the processes below this one."""
    lines = []
    for child in process.children(recursive=True):
        try:
            lines.append(" ".join(child.cmdline()))
        except psutil.Error:  # it has ended
            continue
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "actor", "number"),
    [
        (["rollout", "tiny_mtp", "--prompts", "prompts.jsonl", "--out", "out.jsonl"], "RolloutActor", signal.SIGTERM),
        (["rollout", "tiny_mtp", "--serve", "--port", "0"], "RolloutActor", signal.SIGHUP),
        (["eval", "tiny_mtp"], "RolloutActor", signal.SIGINT),
        (["sync-weights", "tiny_mtp"], "TrainerRank", signal.SIGTERM),
        (["logprob-serve", "tiny_mtp", "--port", "0"], "ScoreRank", signal.SIGHUP),
        (["logprob-serve", "tiny_mtp", "--port", "0"], "ScoreRank", signal.SIGKILL),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_signal_to_the_group_ends_a_command_and_its_processes(
    run: Path, tmp_path: Path, command: list[str], actor: str, number: signal.Signals
) -> None:
    write_prompts(tmp_path / "prompts.jsonl", *({"prompt": f"{row}+1="} for row in range(1000)))
    sets = [part for each in (*SMALL, "cluster.num_cpus=2", f"run_dir={run}") for part in ("--set", each)]
    before, log = set(os.listdir(SHARED_MEMORY)), tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "mtpctl", *command, *sets],
            stdout=file,
            stderr=file,
            cwd=tmp_path,
            env=with_tree(),
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 200
        while f"ray::{actor}" not in titles(psutil.Process(process.pid)):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        started = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number)
        # A server ends with 0 at Ctrl-C and SIGTERM.
        expected = {-number} if number == signal.SIGKILL else {exit_code(number), 0} if "--port" in command else {exit_code(number)}
        assert process.wait(END_S) in expected, log.read_text()
        assert "Traceback" not in log.read_text()
        _, alive = psutil.wait_procs(started, timeout=END_S)
        assert not [each for each in alive if runs(each)]
        # Other runs may use the shared memory of this machine meanwhile.
        new = {name for name in os.listdir(SHARED_MEMORY) if name.startswith("mtpctl-") and run.name in name} - before
        assert not new
    finally:
        process.kill()
        process.wait()
