"""Compare what a new user of mtpctl, verl or TRL writes and reads before the first update. Needs no GPU.

    python benchmarks/peers/first_hour.py lines
    python benchmarks/peers/first_hour.py messages SYSTEM --python ENVIRONMENT/bin/python --rows TASKS/sums --model MODEL

`lines` counts the files in first_hour/, which configure work B. `messages` copies them to a temporary folder, makes one mistake at a time,
and runs the system's command in its environment. `none` is the run without a mistake: it shows how far a run gets without a GPU.
TASKS/sums is a folder of prepare.py.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

FILES = Path(__file__).with_name("first_hour")
SHOWN_LINES = 12
"""Last lines of output that are printed."""


@dataclass(frozen=True)
class System:
    """The files that a user writes, the text of a correct run that a mistake replaces, and the commands without a GPU.

    The text MODEL in the files is replaced by the model's path. `cpu` replaces settings that a small host without a GPU cannot run.
    """

    files: tuple[str, ...]
    mistakes: dict[str, tuple[str, str]]
    commands: tuple[str, ...]
    cpu: tuple[tuple[str, str], ...] = ()


ON_CPU = "--set cluster.device=cpu --set sync.transport=shm --set train.gpus=1 --set rollout.gpus=null --set rollout.replicas=1"
SYSTEMS = {
    "mtpctl": System(
        ("recipe.yaml", "reward_mtpctl.py"),
        {"column": ("prompt: question", "prompt: qestion"), "data": ("path: rows.jsonl", "path: row.jsonl"), "model": ("MODEL", "MODEL_")},
        (
            "{python} -m mtpctl recipe validate recipe.yaml " + ON_CPU,
            "{python} -m mtpctl train recipe.yaml --dry-run " + ON_CPU,
            "{python} -m mtpctl train recipe.yaml --plain " + ON_CPU,
        ),
    ),
    "verl": System(
        ("sums_verl.sh", "rows_verl.py", "reward_verl.py"),
        {"column": ('"prompt"', '"promt"'), "data": ("=train.parquet", "=tain.parquet"), "model": ("MODEL", "MODEL_")},
        ("{python} rows_verl.py && PYTHON={python} sh sums_verl.sh",),
        # verl's actors reserve more CPUs in Ray than a small host has, and its eight storage processes take minutes to start there.
        (
            (
                "_steps=200",
                "_steps=200 ray_kwargs.ray_init.num_cpus=64 transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
            ),
        ),
    ),
    "trl": System(
        ("sums_trl.py",),
        {"column": ('"prompt"', '"promt"'), "data": ('"rows.jsonl"', '"row.jsonl"'), "model": ("MODEL", "MODEL_")},
        ("{python} sums_trl.py",),
        (
            ("use_vllm=True", "use_cpu=True"),
            ("vllm_max_model_length=256,", ""),
            ('"flash_attention_2"', '"sdpa"'),
            ("use_liger_kernel=True", "use_liger_kernel=False"),
            ("eval_on_start=True", "eval_on_start=False"),
        ),
    ),
}


def count(text: str) -> int:
    """Lines that are neither empty nor comments."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


def settings(name: str, text: str) -> int:
    """Settings in a file: values in YAML, overrides of a command, keyword arguments in lines that have only one."""
    pattern = {".yaml": r"^ *\w+: \S", ".sh": r"^ +[\w.]+=\S", ".py": r"^ +\w+=[^=].*,$"}[Path(name).suffix]
    return len(re.findall(pattern, text, re.MULTILINE))


def lines() -> None:
    print("| system | file | lines | settings |\n|---|---|---|---|")
    for name, system in SYSTEMS.items():
        for file in system.files:
            text = (FILES / file).read_text(encoding="utf-8")
            print(f"| {name} | {file} | {count(text)} | {settings(file, text) or ''} |")


def run(command: str, folder: Path, seconds: float) -> tuple[int | None, float, list[str]]:
    """Exit code (None: still running after `seconds`), duration, and the printed lines."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    start = time.monotonic()
    with (folder / "output.txt").open("w+", encoding="utf-8", errors="replace", newline="\n") as output:
        process = subprocess.Popen(
            command, shell=True, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            code = None
        duration = time.monotonic() - start
        output.seek(0)
        # A progress bar overwrites its line.
        return code, duration, [line.rpartition("\r")[2] for line in output.read().rstrip().split("\n")]


def messages(options: argparse.Namespace) -> None:
    system = SYSTEMS[options.system]
    for name in options.only or ["none", *system.mistakes]:
        old, new = system.mistakes.get(name, ("MODEL", "MODEL"))
        changes = [*(system.cpu if options.cpu else ()), (old, new), ("MODEL", str(options.model.resolve()))]
        for command in system.commands:
            with tempfile.TemporaryDirectory(prefix="first_hour_") as text_path:
                folder = Path(text_path)
                for file in ("rows.jsonl", "held_out.jsonl"):
                    shutil.copy(options.rows / file, folder)
                shutil.copy(Path(__file__).with_name("peer_reward.py"), folder)
                for file in system.files:
                    text = (FILES / file).read_text(encoding="utf-8")
                    for before, after in changes:
                        text = text.replace(before, after)
                    (folder / file).write_text(text, encoding="utf-8")
                code, duration, output = run(command.replace("{python}", str(options.python)), folder, options.seconds)
            print(f"== {options.system}, mistake: {name}: {command}")
            print(f"exit code {code}, {duration:.1f} s, {len(output)} lines, the last of them:")
            print("\n".join(f"  {line}" for line in output[-options.show :]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("lines", "messages"))
    parser.add_argument("system", nargs="?", choices=tuple(SYSTEMS))
    parser.add_argument("--python", type=Path, help="the interpreter of the system's environment")
    parser.add_argument("--rows", type=Path, help="a folder of prepare.py")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--only", action="append", metavar="MISTAKE", help="none, column, data or model")
    parser.add_argument("--cpu", action="store_true", help="also change the settings in System.cpu")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of a run")
    parser.add_argument("--show", type=int, default=SHOWN_LINES, help="last lines of output to print")
    options = parser.parse_args()
    if options.what == "lines":
        lines()
    elif None in (options.system, options.python, options.rows, options.model):
        parser.error("messages needs SYSTEM, --python, --rows and --model")
    else:
        messages(options)


if __name__ == "__main__":
    main()
