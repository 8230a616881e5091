"""Drafters of several kinds added to one model: acceptance, tokens per step and speed, on one GPU.

    python benchmarks/drafter_kinds.py --model smollm2 --data sums/rows.jsonl --prompts sums/held_out.jsonl --column question --out kinds
    python benchmarks/drafter_kinds.py --model toy --data rows.jsonl --prompts rows.jsonl --out kinds --steps 8 --self-generate 24 \\
        --drafts 3 --in-flight 4 --requests 16 --tokens 24                                                                  # on a CPU

`mtpctl add-drafter` adds each kind once for each number of drafts and trains it on --data, into the folder --out. Drafters that are already
there are measured only. Then `added_drafter.py` measures them, with greedy and with sampled drafts, against an engine without drafts.
--set passes keys of the training's recipe.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from added_drafter import add_load_options, format_row, measure_in_process, parse_load_options, print_table_heading
from harness import parser


def create(arguments: argparse.Namespace, kind: str, drafts: int) -> Path:
    """The model with a trained drafter."""
    target: Path = arguments.out / f"{kind}-{drafts}"
    if not target.exists():
        layers = arguments.layers if kind == "dflash" else 1
        options = {
            "--kind": kind,
            "--layers": layers,
            "--drafts": drafts,
            "--data": arguments.data,
            "--self-generate": arguments.self_generate,
            "--steps": arguments.steps,
        }
        words = [str(word) for pair in options.items() for word in pair]
        sets = [word for setting in (f"data.columns.prompt={arguments.column}", *arguments.sets) for word in ("--set", setting)]
        command = [sys.executable, "-m", "mtpctl", "add-drafter", arguments.model, str(target), *words, *sets, "--plain"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return target


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--model", required=True, help="folder without a drafter")
    options_parser.add_argument("--data", required=True, type=Path, help="rows to train on")
    options_parser.add_argument("--out", required=True, type=Path, help="folder for the drafters")
    options_parser.add_argument("--kinds", nargs="+", choices=["mtp", "eagle3", "dflash"], default=["eagle3", "dflash"])
    options_parser.add_argument("--drafts", type=int, nargs="+", default=[3, 7])
    options_parser.add_argument("--layers", type=int, default=2, help="of DFlash drafters")
    options_parser.add_argument("--steps", type=int, default=500)
    options_parser.add_argument("--self-generate", type=int, default=12288)
    options_parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    add_load_options(options_parser)
    arguments = options_parser.parse_args()
    arms = {f"{kind}, {drafts}": (create(arguments, kind, drafts), drafts) for kind in arguments.kinds for drafts in arguments.drafts}
    options = parse_load_options(arguments, arguments.model)
    print_table_heading(options)
    baselines = measure_in_process(options, 0, "greedy")
    for load_result in baselines:
        print(format_row("none", load_result, load_result), flush=True)
    for name, (folder, drafts) in arms.items():
        for method in ("greedy", "probabilistic"):
            for measured, baseline in zip(measure_in_process(replace(options, model=str(folder)), drafts, method), baselines, strict=True):
                print(format_row(f"{name}, {method}", measured, baseline), flush=True)


if __name__ == "__main__":
    main()
