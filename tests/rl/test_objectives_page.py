"""docs/objectives.md: its tables are the code's, and its example of a loss of one's own runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mtpctl.recipe import yaml12
from mtpctl.recipe.presets import PRESETS
from mtpctl.recipe.rl import LOSSES, RlConfig
from mtpctl.rl.advantages import Advantage
from mtpctl.rl.losses import loss_metrics, token_terms
from mtpctl.rl.own_loss import check_loss, loss_of
from tests.rl.test_losses import batch

PAGE = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, list[str]]:
    """The cells of a section's table by its first column."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0].partition("|---")[2]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in table}


def block(kind: str, section: str) -> str:
    found = re.search(rf"```{kind}\n(.*?)```", PAGE.partition(f"## {section}\n")[2], re.DOTALL)
    assert found is not None
    return found[1]


def test_every_preset_is_told_with_its_loss_advantage_aggregate_and_paper() -> None:
    told = rows("Presets")
    assert told.keys() == PRESETS.keys()
    for name, (paper, *cells) in ((name, cells) for name, cells in told.items()):
        assert cells[:3] == [PRESETS[name][key] for key in ("loss", "advantage", "aggregate")], name
        assert "https://arxiv.org/abs/" in paper or paper.startswith("the same"), name


def test_every_loss_advantage_and_aggregation_is_told() -> None:
    assert rows("Losses").keys() == set(LOSSES)
    assert rows("Advantages").keys() == set(Advantage.__args__)  # type: ignore[attr-defined]
    assert rows("Aggregation").keys() == {"token", "sequence", "constant"}


@pytest.mark.parametrize("name", LOSSES)
def test_the_recipe_line_of_each_loss_gives_it(name: str) -> None:
    line = rows("Losses")[name][-1].strip("`")
    value = yaml12.parse(line, "page").value
    assert RlConfig.model_validate(value).loss == name


def test_the_example_of_a_loss_of_ones_own_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(block("python", "A loss of your own"))
    parsed = yaml12.parse(block("yaml", "A loss of your own"), "page").value
    assert isinstance(parsed, dict)
    rl = parsed["train"]["rl"]
    config = RlConfig.model_validate(rl | {"loss": rl["loss"].replace("mine.py", str(tmp_path / "mine.py"))})
    check_loss(config)
    inputs = batch()
    terms = token_terms(inputs, config)
    out = loss_of(config)(inputs.logprob, inputs.entropy, terms, config)
    d = (inputs.logprob - inputs.old_logprob) * inputs.mask
    expected = ((-inputs.advantage * d.exp() + 0.1 * d**2) * inputs.mask).sum()
    torch.testing.assert_close(out.loss_sum, expected)
    assert 0 < loss_metrics(out.sums)["actor/far"] < 1
