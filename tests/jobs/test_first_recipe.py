"""`mtpctl init --template reasoning-gym`: a recipe for a pretrained model that the recipe's own checks accept."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpctl.cli.app import main
from mtpctl.cli.recipe import TEMPLATES
from mtpctl.data.problems import Problem
from mtpctl.data.sets import load_problem_sets
from mtpctl.data.tokenizers import make_byte_tokenizer
from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.jobs.first_recipe import (
    FirstTask,
    Machine,
    Setting,
    Workload,
    cautions,
    choose,
    first_task,
    learning_rate,
    signal_probability,
    tree,
)
from mtpctl.recipe.checks import validate
from mtpctl.recipe.loading import load_recipe
from tests.environment import with_tree

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 258,
}
SUFFIX = "Think briefly, then end with: The answer is N."


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of SmolLM2-135M's shape with a byte tokenizer, without usable weights: nothing loads them."""
    folder = tmp_path / "smollm2"
    make_byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def task_of(model: Path, machine: Machine, task: str = "chain_sum") -> FirstTask:
    return first_task("sums", str(model), task, machine, TEMPLATES / "reasoning_gym")


def score_of(model: Path) -> Callable[..., dict[str, float]]:
    """The reward function of the written task."""
    module: dict[str, Any] = {"__name__": "reward"}
    exec(task_of(model, Machine(2)).texts["reward.py"], module)
    score: Callable[..., dict[str, float]] = module["score"]
    return score


def written(task: FirstTask, folder: Path) -> Path:
    folder.mkdir()
    for name, text in task.texts.items():
        (folder / name).write_text(text)
    return folder / "recipe.yaml"


@pytest.mark.parametrize("machine", [Machine(2), Machine(16, 1, 79.6)], ids=["cpu", "gpu"])
def test_recipe_is_valid_and_has_reasons(model: Path, machine: Machine, tmp_path: Path) -> None:
    task = task_of(model, machine)
    path = written(task, tmp_path / "sums")
    recipe = load_recipe(str(path)).recipe
    validate(recipe)
    assert recipe.train.rl.optimizer.lr == 3e-5
    assert recipe.train.rl.dynamic_sampling == (machine.gpus > 0), "an update on a CPU has a fixed number of groups"
    assert recipe.train.rl.signal_backoff == (machine.gpus > 0), "it needs dynamic sampling"
    assert recipe.train.stages == ["draft", "rl"]
    assert recipe.rollout.speculation.num_tokens == recipe.mtp.repeat == (3 if machine.gpus else 1)
    assert recipe.device == ("cuda" if machine.gpus else "cpu") and recipe.data.chat_template
    text = path.read_text()
    for setting in task.settings:
        assert not setting.reason or f"# {setting.reason}\n" in text, setting.key


def test_rows_have_distant_seeds_and_unseen_prompts(model: Path, tmp_path: Path) -> None:
    """About a third of the sums are of single digits, so training rows have them too; the others are unseen."""
    recipe = load_recipe(str(written(task_of(model, Machine(16, 1, 79.6)), tmp_path / "sums"))).recipe
    problems = load_problem_sets(recipe.data, 0, stages=["rl"])
    assert (len(problems.train), len(problems.evaluation)) == (20_000, 512)
    assert 100 <= problems.count_seen() <= 200
    assert all(problem.prompt.endswith(f" =\n{SUFFIX}") for problem in problems.evaluation)
    first: Any = problems.evaluation[0]
    assert eval(first.fields["metadata"]["expression"]) == int(first.answer)


def test_rows_of_a_cpu_are_single_digits_of_which_some_are_unseen(model: Path, tmp_path: Path) -> None:
    recipe = load_recipe(str(written(task_of(model, Machine(2)), tmp_path / "sums"))).recipe
    problems = load_problem_sets(recipe.data, 0, stages=["rl"])
    assert recipe.train.rl.steps * recipe.train.rl.prompts_per_step <= len(problems.train) == 100
    assert all(re.search(r": \d [+-] \d =\n", problem.prompt) for problem in problems.train + problems.evaluation)
    assert len(problems.evaluation) - problems.count_seen() >= 15


def test_task_folder_passes_its_tests_and_regenerates_its_rows(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["init", str(tmp_path / "sums"), "--template", "reasoning-gym", "--model", str(model)])
    assert not ended.value.code
    before = (tmp_path / "sums" / "held_out.jsonl").read_text()
    (tmp_path / "sums" / "held_out.jsonl").unlink()
    environment = with_tree()
    for command in (["sums/make_rows.py"], ["-m", "pytest", "-q", "-p", "no:cacheprovider", "sums"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "sums" / "held_out.jsonl").read_text() == before
    assert "mytask" not in "".join(path.read_text() for path in (tmp_path / "sums").iterdir() if path.is_file())


def test_partial_credit_counts_only_if_requested(model: Path) -> None:
    score, problem = score_of(model), Problem("p", "q", "4", fields={"metadata": {}})
    assert score("The answer is 41.", problem, None) == {"reward": 0.0, "correct": 0.0, "gym": 0.5}
    assert score("The answer is 41.", problem, None, partial=True) == {"reward": 0.5, "correct": 0.0, "gym": 0.5}
    assert score("The answer is +04.0.", problem, None)["reward"] == 1.0


@pytest.mark.parametrize(
    ("response", "reward", "correct"),
    [
        ("3 + 4 = 7 and 7 - 2 = 5. The answer is 5.", 1.0, 1.0),
        ("The answer is 5.", 0.5, 1.0),
        ("3 + 4 = 7 and 7 - 2 = 6. The answer is 6.", 0.5 * (1 + 0.3) / 2, 0.0),
        ("The answer is 6.", 0.0, 0.0),
    ],
)
def test_steps_of_a_sum_are_part_of_the_reward_but_not_of_accuracy(model: Path, response: str, reward: float, correct: float) -> None:
    problem = Problem("p", "q", "5", fields={"metadata": {"expression": "3 + 4 - 2"}})
    result = score_of(model)(response, problem, None, steps=0.5)
    assert result["reward"] == pytest.approx(reward) and result["correct"] == correct


@pytest.mark.parametrize(("task", "args"), [("chain_sum", {"steps": 0.5}), ("leg_counting", {})])
def test_only_sums_have_credit_for_steps(model: Path, task: str, args: dict[str, float], tmp_path: Path) -> None:
    recipe = load_recipe(str(written(task_of(model, Machine(16, 1, 79.6), task), tmp_path / "task"))).recipe
    assert recipe.reward.args == args


def test_another_task_has_its_defaults(model: Path) -> None:
    texts = task_of(model, Machine(2), "leg_counting").texts
    assert "SETTINGS = {}" in texts["make_rows.py"] and texts["rows.jsonl"].count("\n") == 5_000
    assert 'TASK = "leg_counting"' in texts["reward.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--template", "reasoning-gym"], "--model: the template reasoning-gym trains a pretrained model; name its folder or hub id"),
        (["--model", "x"], "--model: only the template reasoning-gym takes a model; in others, edit `model` in the recipe"),
        (["--template", "reasoning-gym", "--model", "MODEL", "--task", "chain_sums"], "dataset chain_sums; did you mean chain_sum?"),
        (["--template", "reasoning-gym", "--model", "MODEL", "--task", "graph_color"], "graph_color has rows without an answer as text"),
        (["--template", "reasoning-gym", "--model", "no/folder/here"], "--model: there is no folder no/folder/here; name a Hugging Face"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    arguments: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["init", str(tmp_path / "sums"), *(str(model) if each == "MODEL" else each for each in arguments)])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1
    assert not (tmp_path / "sums").exists()


@pytest.mark.parametrize("package", ["reasoning_gym", "pytz"])
def test_missing_package_is_named(package: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """reasoning-gym itself, or a package that it imports."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("reasoning_gym", package)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PrerequisiteMissing, match=rf"needs mtpctl\[tasks\]; install it \(.*{package}"):
        task_of(model, Machine(2))


def test_model_without_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UserError, match=r"has no tokenizer"):
        task_of(tmp_path, Machine(2))


SMALL = Workload(134_515_008, 134_515_008, 8192, prompt_tokens=68, answer_tokens=5, rows=20_000)
LARGE = replace(SMALL, parameters=7_600_000_000, active=7_600_000_000)
GPU = Machine(cores=16, gpus=1, gpu_gib=79.6)


def values(work: Workload, machine: Machine) -> dict[str, object]:
    return {setting.key: setting.value for setting in choose(work, machine)}


@pytest.mark.parametrize(
    ("parameters", "rate"), [(1e5, 2e-4), (2e6, 2e-4), (134_515_008, 3e-5), (4.9e8, 1e-5), (1.5e9, 4e-6), (7e9, 1e-6), (3e10, 1e-6)]
)
def test_learning_rate_is_interpolated_between_measured_sizes(parameters: float, rate: float) -> None:
    assert learning_rate(parameters) == rate


def test_learning_rate_falls_with_size() -> None:
    rates = [learning_rate(1e6 * 1.5**step) for step in range(30)]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) > 10


def test_signal_is_the_probability_of_different_rewards() -> None:
    """Of all outcomes of a group of 3 at a success rate of 0.2, all but none and all."""
    outcomes = [math.comb(3, k) * 0.2**k * 0.8 ** (3 - k) for k in (1, 2)]
    assert signal_probability(0.2, 3) == pytest.approx(sum(outcomes))
    assert signal_probability(0.0, 8) == signal_probability(1.0, 8) == 0


def test_small_model_on_one_gpu_has_the_measured_settings() -> None:
    chosen = values(SMALL, GPU)
    assert chosen["train.rl.optimizer.lr"] == 3e-5 and chosen["train.rl.minibatches"] == 4
    assert (chosen["rollout.max_tokens"], chosen["rollout.context"]) == (160, 256)
    engines, share = chosen["rollout.replicas"], chosen["rollout.gpus"]
    assert isinstance(engines, int) and isinstance(share, float) and engines * share + 0.4 <= 1


def test_fewer_cores_have_fewer_engines() -> None:
    counts = [values(SMALL, Machine(cores, 1, 80.0))["rollout.replicas"] for cores in (2, 8, 16, 128)]
    assert counts == [1, 1, 2, 2]


@pytest.mark.parametrize(("gpus", "trainers", "engines"), [(2, 1, 1), (8, 4, 4)])
def test_large_model_divides_the_gpus(gpus: int, trainers: int, engines: int) -> None:
    chosen = values(LARGE, Machine(64, gpus, 80.0))
    assert (chosen["train.parallel.dp"], chosen["rollout.replicas"]) == (trainers, engines)
    assert chosen["train.rl.optimizer.lr"] == 1e-6 and "sync.transport" not in chosen


def test_few_rows_make_small_updates() -> None:
    assert values(replace(SMALL, rows=40), GPU)["train.rl.prompts_per_step"] == 4
    chosen = values(replace(SMALL, rows=5), GPU)
    assert (chosen["train.rl.prompts_per_step"], chosen["train.rl.minibatches"]) == (2, 2)


def test_response_fits_the_positions_of_the_model() -> None:
    chosen = values(replace(SMALL, positions=100), Machine(2))
    assert (chosen["rollout.max_tokens"], chosen["rollout.context"]) == (32, 100)


def test_model_that_does_not_fit_has_a_caution() -> None:
    assert "use an adapter" in cautions(LARGE, GPU)[0]
    assert not cautions(LARGE, Machine(64, 8, 80.0)) and not cautions(SMALL, GPU) and not cautions(SMALL, Machine(2))
    assert "one of 2 GPUs" in cautions(SMALL, replace(GPU, gpus=2))[0]


def test_dotted_settings_become_a_nested_tree() -> None:
    assert tree([Setting("a.b.c", 1), Setting("a.d", 2), Setting("e", 3)]) == {"a": {"b": {"c": 1}, "d": 2}, "e": 3}
