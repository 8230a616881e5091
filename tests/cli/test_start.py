"""The command line starts at once: what it imports before a command runs, and how long that takes."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "vllm", "transformers", "megatron", "numpy", "pyarrow")
PROGRAM = """
import sys
from mtpctl.cli.app import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code, ended.code
print("imported:", *(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
"""


def child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (["--help"], 0.5),
        (["recipe", "validate", "tiny_mtp"], 1.0),
        (["train", "tiny_mtp", "--dry-run", "--set", "cluster.num_cpus=8"], 2.0),
        (["train", "mimo7b_mtp", "--dry-run"], 2.0),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_nothing_heavy_is_imported_and_it_is_quick(arguments: list[str], limit: float) -> None:
    # Processor seconds: start-up is one thread, so on an idle machine they are the wall time, and other work does not change them.
    taken = []
    for _ in range(2):
        before = child_seconds()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(heavy=HEAVY), *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        taken.append(child_seconds() - before)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "imported:\n"
    assert min(taken) < limit
