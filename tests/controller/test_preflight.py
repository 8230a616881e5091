"""A recipe's environment is tried before anything starts: by `recipe validate`, `--dry-run`, `train` and `rollout` alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtpctl.cli.app import app, main
from mtpctl.controller.preflight import check_code
from mtpctl.controller.prepare import prepare
from mtpctl.data import rows
from mtpctl.errors import UserError
from mtpctl.jobs import rollout
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.schema import Recipe
from tests.fakes.runs import SMALL, write_prompts

MODULE = "tests.fakes.user_environments"
KEY_ERROR = r"^rollout\.environment: user_environments\.py:\d+: KeyError: "


def recipe(*sets: str) -> Recipe:
    return load_recipe("tiny_mtp", sets=[*SMALL, "data.task.train_size=8", "data.task.eval_size=4", *sets]).recipe


def test_working_environment_is_tried_on_three_problems() -> None:
    check_code(recipe(f"rollout.environment={MODULE}:Echo", "rollout.environment_args={times: 2}"))
    check_code(recipe())


def test_failing_environment_is_rejected_with_its_line(tmp_path: Path) -> None:
    failing = recipe(f"rollout.environment={MODULE}:Raises")
    with pytest.raises(UserError, match=KEY_ERROR):
        check_code(failing)
    with pytest.raises(UserError, match=KEY_ERROR):
        prepare(failing, tmp_path / "run")


def test_environment_failing_on_held_out_rows_is_rejected_with_the_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "times": 2}\n')
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    (tmp_path / "own.py").write_text(
        "class Own:\n    stop = []\n    def __init__(self, problem): self.times = problem.fields['times']\n    def reply(self, turn): ...\n"
    )
    own = ["data.task=", f"data.path={tmp_path}/rows.jsonl", f"rollout.environment={tmp_path}/own.py:Own"]
    check_code(recipe(*own))
    message = r"^rollout\.environment: own\.py:3: KeyError: 'times' \(with the held-out row held\.jsonl:1\)$"
    for held_out in (f"data.eval_path={tmp_path}/held.jsonl", f"evaluation.sets.a={{path: {tmp_path}/held.jsonl}}"):
        with pytest.raises(UserError, match=message):
            check_code(recipe(*own, held_out))


def test_reward_failing_on_held_out_rows_is_rejected_with_the_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "points": 2}\n')
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    (tmp_path / "own.py").write_text("def score(response, problem, sample): return problem.fields['points']\n")
    own = ["data.task=", f"data.path={tmp_path}/rows.jsonl", f"reward.function={tmp_path}/own.py:score"]
    check_code(recipe(*own))
    held_out = f"evaluation.sets.a={{path: {tmp_path}/held.jsonl%s}}"
    check_code(recipe(*own, held_out % ", reward: {function: exact}"))
    for wrong in (f"data.eval_path={tmp_path}/held.jsonl", held_out % ""):
        with pytest.raises(UserError, match=r"^reward\.function: own\.py:1: KeyError: 'points', for held\.jsonl:1 with the"):
            check_code(recipe(*own, wrong))


def test_run_and_preflight_try_user_code_in_the_same_order(tmp_path: Path) -> None:
    """Loss, environment, reward and rewards of held-out sets are fixed one after the other; both commands report the next one."""
    functions = (
        "def loss(logprob): ...",
        "def score(response, problem, sample): return 1 / 0",
        "def advantage(rewards, *_): return rewards[:2]",
    )
    (tmp_path / "own.py").write_text("\n".join(functions))
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    own = f"{tmp_path}/own.py"
    mistakes = {
        f"train.rl.loss={own}:loss": r"^train\.rl\.loss: ",
        f"train.rl.advantage={own}:advantage": r"^train\.rl\.advantage: own\.py:3: it returned a tensor of shape \[2\] for 6 responses",
        f"rollout.environment={MODULE}:Raises": KEY_ERROR,
        f"reward.function={own}:score": r"^reward\.function: own\.py:2: ",
        f"evaluation.sets={{held: {{path: {tmp_path}/held.jsonl, reward: {{function: '{own}:score'}}}}}}": r"^evaluation\.sets\.held\.",
    }
    while mistakes:
        wrong = recipe(*mistakes)
        message = mistakes.pop(next(iter(mistakes)))
        with pytest.raises(UserError, match=message):
            check_code(wrong)
        with pytest.raises(UserError, match=message):
            prepare(wrong, tmp_path / "run")


def test_environment_reward_requires_a_reward_method() -> None:
    check_code(recipe(f"rollout.environment={MODULE}:Rewards", "reward.function=environment"))
    with pytest.raises(UserError, match=r"^reward\.function: tests\.fakes\.user_environments:Echo has no method `reward\(\)`; add it"):
        check_code(recipe(f"rollout.environment={MODULE}:Echo", "reward.function=environment"))


def test_environment_is_not_tried_without_rl() -> None:
    check_code(recipe(f"rollout.environment={MODULE}:Raises", "train.stages=[sft]"))


def test_rollout_command_tries_the_environment(tmp_path: Path) -> None:
    created = recipe(f"run_dir={tmp_path / 'run'}")
    prepare(created, tmp_path / "run")
    failing = created.model_copy(update={"rollout": created.rollout.model_copy(update={"environment": f"{MODULE}:Raises"})})
    prompts = write_prompts(tmp_path / "p.jsonl", {"prompt": "1"})
    with pytest.raises(UserError, match=KEY_ERROR):
        rollout.rollout(failing, prompts, tmp_path / "o", n=1, report=print, progress=lambda *_: None)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("command", [["recipe", "validate", "tiny_mtp"], ["train", "tiny_mtp", "--dry-run"]])
def test_failing_user_code_is_a_one_line_error_with_exit_code_2(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["mtpctl", *command, "--set", f"rollout.environment={MODULE}:Raises"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rollout.environment: user_environments.py:")


def test_arguments_of_a_verifier_are_checked_without_rows() -> None:
    with pytest.raises(UserError, match=r"^reward\.args: score\(.*second=1\): .*'second'; did you mean seconds\?$"):
        check_code(recipe("reward.function=math", "reward.args={second: 1}"))


def test_only_tried_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3 + "no JSON\n")
    check_code(recipe("data.task=", f"data.path={path}", f"rollout.environment={MODULE}:Echo"))


def test_uncached_dataset_does_not_contact_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", asked)
    monkeypatch.setattr("mtpctl.data.rows._cached_layout", absent)
    sets = ["data.task=", "data.path=openai/gsm8k", f"rollout.environment={MODULE}:Echo"]
    (warning,) = check_code(recipe(*sets))
    assert warning == "openai/gsm8k is not in the cache yet: your code was loaded, and is tested on rows when the run starts"


def absent(name: str) -> None:
    raise rows._NotCached


# The reward function is tried on the first rows before anything starts, and every mistake of it is one line with exit code 2.

ROWS = "".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(5))


def check(folder: Path, judge: str, reward: str = "") -> tuple[int, str]:
    """`mtpctl recipe validate` on the tiny recipe with this reward function: exit code and output."""
    (folder / "judge.py").write_text(judge)
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "own.yaml").write_text(f"data: {{task: null, path: rows.jsonl}}\nreward: {{function: judge.py:score{reward}}}\n")
    result = CliRunner().invoke(app, ["recipe", "validate", "tiny_mtp", "--overlay", str(folder / "own.yaml")])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return getattr(result.exception, "exit_code", -1), str(result.exception)
    return result.exit_code, result.output


def test_reward_is_tried_on_the_solutions_of_three_rows(tmp_path: Path) -> None:
    judge = f"""
def score(response, problem, sample):
    assert bytes(sample.response_ids.tolist()).decode() == response == problem.answer
    open({str(tmp_path / "seen")!r}, "a").write(problem.prompt_id + " ")
    return 1.0
"""
    assert check(tmp_path, judge)[0] == 0
    assert sorted((tmp_path / "seen").read_text().split()) == ["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"]


@pytest.mark.parametrize(
    ("judge", "reward", "message"),
    [
        (
            "def score(response, problem, sample): return 1 / 0",
            "",
            "reward.function: judge.py:1: ZeroDivisionError: division by zero, for rows",
        ),
        ("def score(response, problem, sample): return float('nan')", "", "reward.function: judge.py:1: score returned nan, which is not"),
        ("import time\ndef score(*a): time.sleep(9)", ", timeout_s: 0.5", "reward.function: judge.py:2: score took more than 0.5 s"),
        ("def score(response): return 1", "", "reward.function: score(response) cannot be called as score(response, problem, sample)"),
        ("def score(*a): return 1", ", args: {bonus: 2}", "reward.args: score(*a) cannot be called as"),
        ("async def score(response, problem, sample): raise KeyError('x')", "", "reward.function: judge.py:1: KeyError: 'x', for rows"),
    ],
)
def test_mistakes_in_a_reward_are_reported(tmp_path: Path, judge: str, reward: str, message: str) -> None:
    code, output = check(tmp_path, judge, reward)
    assert code == 2 and output.startswith(f"error: {message}") and "\n" not in output.strip()


def test_reward_of_zero_for_every_solution_is_a_caution(tmp_path: Path) -> None:
    code, output = check(tmp_path, "def score(response, problem, sample): return 0.0")
    assert code == 0 and "gives 0 for the solutions of the first 3 training problems themselves" in output
    (tmp_path / "held.jsonl").write_text(ROWS)
    judge = "def score(response, problem, sample): return 1.0\ndef zero(response, problem, sample): return 0.0"
    sets = f"}}\nevaluation: {{sets: {{own: {{path: {tmp_path}/held.jsonl, reward: {{function: 'judge.py:zero'}}}}}}"
    code, output = check(tmp_path, judge, sets)
    assert code == 0 and "judge.py:zero gives 0 for the solutions" in output


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("{function: 'judge.py:fails'}", "reward.function: judge.py:2: ZeroDivisionError: division by zero, for held.jsonl:1"),
        ("{function: 'judge.py:score', args: {bonsu: 1}}", "reward.args: score(response, problem, sample, bonus=0) cannot be called as"),
        ("{function: math, args: {second: 1}}", "reward.args: score(response, problem, sample, seconds=5.0) cannot be called as"),
        ("{function: length}", "reward.args: length takes one of target and max, in tokens, of at least 1; set for example {max: 512}"),
    ],
)
def test_rewards_of_held_out_sets_are_tried_on_their_own_rows(tmp_path: Path, reward: str, message: str) -> None:
    (tmp_path / "held.jsonl").write_text(ROWS)
    judge = "def score(response, problem, sample, bonus=0): return 1.0\ndef fails(response, problem, sample): return 1 / 0"
    sets = f"}}\nevaluation: {{sets: {{own: {{path: {tmp_path}/held.jsonl, reward: {reward}}}}}"
    code, output = check(tmp_path, judge, sets)
    assert code == 2 and output.removeprefix("error: ").startswith(f"evaluation.sets.own.{message}") and "\n" not in output.strip()
