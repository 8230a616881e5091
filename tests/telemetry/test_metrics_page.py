"""docs/metrics.md matches its tables, and its advice names existing recipe keys."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mtpctl.recipe.fields import all_dotted_keys
from mtpctl.telemetry.names import METRICS, describe
from scripts.metrics_advice import ADVICE, listed

ROOT = Path(__file__).resolve().parents[2]


def test_page_is_current() -> None:
    script = ROOT / "scripts" / "generate_metrics_page.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_is_listed_once_and_advice_names_existing_metrics() -> None:
    names = [name for name, *_ in listed()]
    assert set(METRICS) <= set(names) and len(set(names)) == len(names)
    assert set(ADVICE) <= set(names)
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert all(page.count(f"\n| `{name}` |") == 1 for name in names)


@pytest.mark.parametrize("name", ["mtp/loss_N", "mtp/accept_N", "rollout/spec_accept_rate_N"])
def test_pattern_row_matches_description_of_single_metric(name: str) -> None:
    unit, meaning = next((unit, meaning) for other, unit, meaning, _ in listed() if other == name)
    one = describe(f"{name[:-1]}1")
    assert (one.unit, one.meaning) == (unit, meaning.replace("N", "1"))


def test_keys_in_advice_are_recipe_keys() -> None:
    known = {".".join(key.split(".")[start:]) for key in all_dotted_keys() for start in range(key.count(".") + 1)}
    for name, advice in ADVICE.items():
        for quoted in re.findall(r"`([^`]+)`", f"{advice.healthy} {advice.act}"):
            word = quoted.split(":")[0]
            if "/" in word or word.startswith("mtpctl ") or word in ("async", "step", "draft", "auto", "probabilistic"):
                continue
            assert word in known, f"{name}: {word}"
