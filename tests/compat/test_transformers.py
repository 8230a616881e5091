"""transformers is imported without a test of every installed file, and learns the same about packages."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from mtpctl.compat.transformers import packages_distributions

PROGRAM = """
import os, sys
tested, stat = [], os.stat
def counted(path, *args, **options):
    tested.append(path)
    return stat(path, *args, **options)
os.stat = counted
from mtpctl.compat.transformers import import_transformers
import_transformers()
print(len(tested), "transformers" in sys.modules)
"""


def test_packages_and_distributions_are_those_of_python() -> None:
    expected, ours = importlib.metadata.packages_distributions(), packages_distributions()
    assert {name: sorted(each) for name, each in expected.items()}.items() <= {name: sorted(each) for name, each in ours.items()}.items()
    assert ours["PIL"] == ["pillow"] and ours["torch"] == ["torch"] and ours["yaml"] == ["PyYAML"]


def test_import_tests_no_installed_files() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    tested, imported = done.stdout.split()
    installed = sum(len((each.read_text("RECORD") or "").splitlines()) for each in importlib.metadata.distributions())
    assert imported == "True" and int(tested) < installed / 10
