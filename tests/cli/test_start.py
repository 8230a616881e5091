"""The command line starts at once: what it imports before a command runs, and how long that takes."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile

import pytest

from mtpctl.cli.app import COMMANDS, main
from tests.environment import with_tree

PARSER = {"annotated_doc", "shellingham", "typer"}
RECIPE = PARSER | {"annotated_types", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection", "yaml"}
TERMINAL = RECIPE | {"markdown_it", "mdurl", "packaging", "pygments", "rich"}
HUB = RECIPE | {"filelock", "httpx2", "huggingface_hub", "idna", "tqdm"}
TOKENIZER = HUB | {"PIL", "anyio", "h11", "httpcore2", "jinja2", "markupsafe", "numpy", "packaging", "regex", "sniffio", "tokenizers"}
TOKENIZER |= {"transformers", "truststore"}
"""A dry run loads the tokenizer and renders a row with its template, without torch, Ray or vLLM."""
PROGRAM = """
import sys
from mtpctl.cli.app import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code, ended.code
installed = (name for name, module in sys.modules.items() if "site-packages" in (getattr(module, "__file__", None) or ""))
print(*sorted({name.partition(".")[0] for name in installed} - {"mtpctl", "_distutils_hack"}), file=sys.stderr)
print(*sorted(name for name in sys.modules if name.startswith("mtpctl.")), file=sys.stderr)
"""


def child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def started(arguments: list[str]) -> tuple[set[str], set[str]]:
    """The installed packages and the modules of mtpctl that a command has imported when it ends, in a folder without runs."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=with_tree(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    packages, modules = done.stderr.splitlines()
    return set(packages.split()), set(modules.split())


@pytest.mark.parametrize(
    ("arguments", "needed", "limit"),
    [
        (["--help"], PARSER, 0.5),
        (["recipe", "validate", "tiny_mtp"], RECIPE, 1.0),
        (["train", "tiny_mtp", "--dry-run", "--set", "cluster.num_cpus=8"], TOKENIZER, 3.0),
        (["train", "mimo7b_mtp", "--dry-run"], HUB, 2.0),
        # The largest config: 141,000 tensors of experts.
        (["doctor", "--model", "Qwen3.8-2.4T-A95B"], TERMINAL, 2.0),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_light_commands_import_little_and_start_fast(arguments: list[str], needed: set[str], limit: float) -> None:
    # Processor seconds: start-up is one thread, so on an idle machine they are the wall time. Other work on its core changes them less.
    taken = []
    while min(taken, default=limit) >= limit and len(taken) < 6:
        before = child_seconds()
        packages, _modules = started(arguments)
        taken.append(child_seconds() - before)
        assert packages <= needed
    assert min(taken) < limit


def test_help_imports_no_command() -> None:
    assert started(["--help"])[1] == {"mtpctl.cli", "mtpctl.cli.options", "mtpctl.cli.app", "mtpctl.errors", "mtpctl.signals"}


def test_command_imports_no_other_command() -> None:
    _, modules = started(["recipe", "validate", "tiny_mtp"])
    commands = {f"mtpctl.cli.{place.partition(':')[0]}" for place, _ in COMMANDS.values()}
    assert modules & commands == {"mtpctl.cli.recipe"}
    assert not {name for name in modules if name.startswith(("mtpctl.trainer", "mtpctl.rollout"))}, "those are for a run"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert not ended.value.code
    assert f"Usage: mtpctl {name} " in capsys.readouterr().out


def test_misspelled_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trian"])
    assert ended.value.code == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err
