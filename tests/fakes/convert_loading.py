"""Measures the cost of loading a folder into an engine: `python -m tests.fakes.convert_loading FOLDER [--make]` prints JSON.

Three times in turn: seconds, and anonymous memory beyond that of the model itself. `--make` first makes the folder: layers
of MiMo-7B's width, four of them and one of MTP, in bf16 (2.9 GB).
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path

import torch

from mtpctl.convert.hf_folder import HfFolder, create_hf_folder
from mtpctl.recipe.model import MtpConfig
from mtpctl.trainer.engine import MegatronEngine
from tests.fakes.tiny import MIMO, engine

LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 65536,
    "initializer_range": 0.02,
}


def anonymous() -> int:
    """Anonymous memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def reading(trainer: MegatronEngine, folder: Path) -> tuple[float, int]:
    """Seconds, and the peak increase of anonymous memory in bytes."""
    before, peak, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    trainer.load(folder)
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    return seconds, peak[0] - before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", action="store_true")
    said = parser.parse_args()
    if said.make:
        create_hf_folder(MIMO | LARGE, said.folder, seed=0, dtype=torch.bfloat16)
    folder, result = HfFolder.open(said.folder), []
    with engine(folder, train=False, precision="bf16", mtp=MtpConfig(mode="load"), random_seed=0) as trainer:
        for _ in range(3):
            seconds, peak = reading(trainer, said.folder)
            result.append({"seconds": round(seconds, 2), "gib": round(peak / 2**30, 3)})
    print(json.dumps(result))


if __name__ == "__main__":
    main()
