"""A recipe's environment is tried before anything starts: by `recipe check`, `--dry-run`, `train` and `rollout` alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtpctl.cli.app import main
from mtpctl.controller.prepare import prepare
from mtpctl.controller.rehearsal import rehearse
from mtpctl.data import rows
from mtpctl.errors import UserError
from mtpctl.jobs import rollout
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.schema import Recipe
from tests.jobs.test_rollout import SMALL, write_prompts

MODULE = "tests.fakes.user_environments"
TOLD = r"^rollout\.environment: user_environments\.py:\d+: KeyError: "


def recipe(*sets: str) -> Recipe:
    return load_recipe("tiny_mtp", sets=[*SMALL, "data.task.train_size=8", "data.task.eval_size=4", *sets]).recipe


def test_an_environment_that_works_is_made_for_three_problems() -> None:
    rehearse(recipe(f"rollout.environment={MODULE}:Echo", "rollout.environment_args={times: 2}"))
    rehearse(recipe())


def test_one_that_fails_is_refused_with_its_line(tmp_path: Path) -> None:
    failing = recipe(f"rollout.environment={MODULE}:Raises")
    with pytest.raises(UserError, match=TOLD):
        rehearse(failing)
    with pytest.raises(UserError, match=TOLD):
        prepare(failing, tmp_path / "run")


def test_one_that_fails_on_held_out_rows_alone_is_refused_with_the_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "times": 2}\n')
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    (tmp_path / "own.py").write_text(
        "class Own:\n    stop = []\n    def __init__(self, problem): self.times = problem.fields['times']\n    def reply(self, turn): ...\n"
    )
    own = ["data.task=", f"data.path={tmp_path}/rows.jsonl", f"rollout.environment={tmp_path}/own.py:Own"]
    rehearse(recipe(*own))
    told = r"^rollout\.environment: own\.py:3: KeyError: 'times' \(with the held-out row held\.jsonl:1\)$"
    for held_out in (f"data.eval_path={tmp_path}/held.jsonl", f"evaluation.sets.a={{path: {tmp_path}/held.jsonl}}"):
        with pytest.raises(UserError, match=told):
            rehearse(recipe(*own, held_out))


def test_a_reward_that_fails_on_held_out_rows_alone_is_refused_with_the_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "points": 2}\n')
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    (tmp_path / "own.py").write_text("def score(response, problem, sample): return problem.fields['points']\n")
    own = ["data.task=", f"data.path={tmp_path}/rows.jsonl", f"reward.function={tmp_path}/own.py:score"]
    rehearse(recipe(*own))
    held_out = f"evaluation.sets.a={{path: {tmp_path}/held.jsonl%s}}"
    rehearse(recipe(*own, held_out % ", reward: {function: exact}"))
    for wrong in (f"data.eval_path={tmp_path}/held.jsonl", held_out % ""):
        with pytest.raises(UserError, match=r"^reward\.function: own\.py:1: KeyError: 'points', for held\.jsonl:1 with the"):
            rehearse(recipe(*own, wrong))


def test_a_run_tries_in_the_order_of_the_commands_that_start_nothing(tmp_path: Path) -> None:
    """Loss, environment, reward, rewards of held-out sets: mended one after the other, each is the next to be told by both."""
    (tmp_path / "own.py").write_text("def loss(logprob): ...\ndef score(response, problem, sample): return 1 / 0\n")
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    own = f"{tmp_path}/own.py"
    mistakes = {
        f"train.rl.loss={own}:loss": r"^train\.rl\.loss: ",
        f"rollout.environment={MODULE}:Raises": TOLD,
        f"reward.function={own}:score": r"^reward\.function: own\.py:2: ",
        f"evaluation.sets={{held: {{path: {tmp_path}/held.jsonl, reward: {{function: '{own}:score'}}}}}}": r"^evaluation\.sets\.held\.",
    }
    while mistakes:
        wrong = recipe(*mistakes)
        told = mistakes.pop(next(iter(mistakes)))
        with pytest.raises(UserError, match=told):
            rehearse(wrong)
        with pytest.raises(UserError, match=told):
            prepare(wrong, tmp_path / "run")


def test_the_environments_reward_needs_an_environment_that_gives_one() -> None:
    rehearse(recipe(f"rollout.environment={MODULE}:Rewards", "reward.function=environment"))
    with pytest.raises(UserError, match=r"^reward\.function: tests\.rollout\.user_environments:Echo has no method `reward\(\)`; write one"):
        rehearse(recipe(f"rollout.environment={MODULE}:Echo", "reward.function=environment"))


def test_a_stage_without_responses_has_no_environment() -> None:
    rehearse(recipe(f"rollout.environment={MODULE}:Raises", "train.stages=[sft]"))


def test_samples_without_training_try_it_too(tmp_path: Path) -> None:
    made = recipe(f"run_dir={tmp_path / 'run'}")
    prepare(made, tmp_path / "run")
    failing = made.model_copy(update={"rollout": made.rollout.model_copy(update={"environment": f"{MODULE}:Raises"})})
    prompts = write_prompts(tmp_path / "p.jsonl", {"prompt": "1"})
    with pytest.raises(UserError, match=TOLD):
        rollout.rollout(failing, prompts, tmp_path / "o", n=1, say=print, progress=lambda *_: None)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("command", [["recipe", "check", "tiny_mtp"], ["train", "tiny_mtp", "--dry-run"]])
def test_it_is_exit_2_and_one_line(command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["mtpctl", *command, "--set", f"rollout.environment={MODULE}:Raises"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rollout.environment: user_environments.py:")


def test_arguments_of_a_reward_that_only_compares_are_checked_without_rows() -> None:
    with pytest.raises(UserError, match=r"^reward\.args: score\(.*second=1\): .*'second'; did you mean seconds\?$"):
        rehearse(recipe("reward.function=math", "reward.args={second: 1}"))


def test_no_more_rows_are_read_than_are_tried(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3 + "no JSON\n")
    rehearse(recipe("data.task=", f"data.path={path}", f"rollout.environment={MODULE}:Echo"))


def test_a_dataset_that_is_not_in_the_cache_is_no_reason_to_ask_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", asked)
    monkeypatch.setattr("mtpctl.data.rows._cached", absent)
    sets = ["data.task=", "data.path=openai/gsm8k", f"rollout.environment={MODULE}:Echo"]
    (warning,) = rehearse(recipe(*sets))
    assert warning == "openai/gsm8k is not in the cache yet: your code was loaded, and is tried on rows when the run starts"


def absent(name: str) -> None:
    raise rows._NotCached
