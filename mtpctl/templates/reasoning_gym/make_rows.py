"""The rows of mytask: reasoning-gym generates them. Run this file after a change; it writes rows.jsonl and held_out.jsonl."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it imports
    from reasoning_gym import create_dataset

TASK = "chain_sum"
SETTINGS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 3}
SUFFIX = "Think briefly, then end with: The answer is N."
TRAINING = 20_000
HELD_OUT = 512
SEEDS = 10_000_019, 77_000_027
"""Of training and held-out rows. Row i of a dataset is drawn with seed + i, so two seeds must be further apart than the number of rows."""


def make_rows(seed: int, count: int) -> list[dict[str, object]]:
    """`count` rows: question, answer, and the metadata that the scorer needs."""
    dataset = create_dataset(TASK, seed=seed, size=count, **SETTINGS)
    return [
        {"question": f"{entry['question']}\n{SUFFIX}", "answer": entry["answer"], "metadata": entry["metadata"]}
        for entry in (dataset[index] for index in range(count))
    ]


if __name__ == "__main__":
    for name, seed, count in (("rows.jsonl", SEEDS[0], TRAINING), ("held_out.jsonl", SEEDS[1], HELD_OUT)):
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in make_rows(seed, count))
        Path(__file__).with_name(name).write_text("".join(lines), encoding="utf-8")
