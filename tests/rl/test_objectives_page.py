"""docs/objectives.md: its tables match the code, and its examples of a user-defined loss and advantage run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mtpctl.recipe import yaml12
from mtpctl.recipe.rl import ADVANTAGES, LOSSES, PRESETS, RlConfig
from mtpctl.rl.losses import loss_metrics, token_terms
from mtpctl.rl.user_objective import check_objective, compute_advantages, load_loss
from tests.fakes.policy_batch import batch, rl_config

PAGE = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, list[str]]:
    """The cells of a section's table by its first column."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0].partition("|---")[2]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in table}


def block(kind: str, section: str) -> str:
    match = re.search(rf"```{kind}\n(.*?)```", PAGE.partition(f"## {section}\n")[2], re.DOTALL)
    assert match is not None
    return match[1]


def test_preset_table_matches_the_presets() -> None:
    table = rows("Presets")
    assert table.keys() == PRESETS.keys()
    for name, (paper, *cells) in ((name, cells) for name, cells in table.items()):
        assert cells[:3] == [PRESETS[name][key] for key in ("loss", "advantage", "aggregate")], name
        assert "https://arxiv.org/abs/" in paper or paper.startswith("the same"), name


def test_tables_list_every_loss_advantage_and_aggregation() -> None:
    assert rows("Losses").keys() == set(LOSSES)
    assert rows("Advantages").keys() == set(ADVANTAGES)
    assert rows("Aggregation").keys() == {"token", "sequence", "constant"}


@pytest.mark.parametrize("name", LOSSES)
def test_recipe_line_of_a_loss_selects_it(name: str) -> None:
    line = rows("Losses")[name][-1].strip("`")
    value = yaml12.parse(line, "page").value
    assert RlConfig.model_validate(value).loss == name


def example(section: str, key: str, tmp_path: Path) -> RlConfig:
    """The configuration of a section's example, with its code in a file."""
    (tmp_path / "mine.py").write_text(block("python", section))
    parsed = yaml12.parse(block("yaml", section), "page").value
    assert isinstance(parsed, dict)
    rl = parsed["train"]["rl"]
    config = rl_config(**rl | {key: rl[key].replace("mine.py", str(tmp_path / "mine.py"))})
    check_objective(config)
    return config


def test_example_of_a_user_defined_loss_runs(tmp_path: Path) -> None:
    config, inputs = example("A user-defined loss", "loss", tmp_path), batch()
    terms = token_terms(inputs, config)
    out = load_loss(config)(inputs.logprob, inputs.entropy, terms, config)
    d = (inputs.logprob - inputs.old_logprob) * inputs.mask
    expected = ((-inputs.advantage * d.exp() + 0.1 * d**2) * inputs.mask).sum()
    torch.testing.assert_close(out.loss_sum, expected)
    assert 0 < loss_metrics(out.sums)["actor/far"] < 1


def test_example_of_a_user_defined_advantage_runs(tmp_path: Path) -> None:
    rewards, groups, lengths = torch.tensor([1.0, 0.0, 0.0, 5.0]), torch.tensor([4, 4, 4, 7]), torch.ones(4)
    advantages = compute_advantages(rewards, groups, lengths, example("A user-defined advantage", "advantage", tmp_path))
    assert advantages.tolist() == [1.0, 0.0, 0.0, 0.0], "the reward minus the median of its group, at most 2"
