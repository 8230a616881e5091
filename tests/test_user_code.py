"""User-defined objects are loaded from files and modules, and errors name the recipe field, or file and line."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from mtpctl.errors import UserError
from mtpctl.user_code import check_call, describe_error, is_code_reference, load, location_of


def written(folder: Path, text: str, name: str = "judge.py") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_name_with_a_colon_is_a_reference() -> None:
    assert is_code_reference("judge.py:score") and is_code_reference("package.module:score")
    assert not is_code_reference("math")


def test_a_function_is_loaded_from_a_file_that_imports_its_neighbours(tmp_path: Path) -> None:
    written(tmp_path, "POINTS = 3", "points_of_judge.py")
    file = written(tmp_path, "from points_of_judge import POINTS\ndef score(): return POINTS\n")
    score = load(f"{file}:score", "reward.function")
    assert callable(score) and score() == 3


def test_files_with_the_same_name_are_distinct_and_their_classes_are_picklable(tmp_path: Path) -> None:
    one, two = (load(f"{written(tmp_path / n, f'class Echo: mark = {n!r}')}:Echo", "f") for n in ("one", "two"))
    assert isinstance(one, type) and isinstance(two, type)
    assert (one.mark, two.mark) == ("one", "two")  # type: ignore[attr-defined]
    assert type(pickle.loads(pickle.dumps(two()))) is two


def test_a_function_is_loaded_from_a_module() -> None:
    assert load("json:dumps", "reward.function") is sys.modules["json"].dumps


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("judge.py:", "neither FILE.py:NAME nor MODULE:NAME"),
        (":score", "neither FILE.py:NAME nor MODULE:NAME"),
        ("{dir}/jugde.py:score", "there is no file {dir}/jugde.py; did you mean {dir}/judge.py?"),
        ("{dir}/far.py:score", "there is no file {dir}/far.py in {dir}"),
        ("{dir}/judge.py:scroe", "defines no scroe; did you mean score?"),
        ("{dir}/judge.py:reward", "defines no reward; it defines score"),
        ("{dir}/points.py:reward", "defines no reward; it defines no function and no class"),
        ("no_such_package.judge:score", "there is no module no_such_package; install it, or name a file as FILE.py:NAME"),
        ("{dir}/broken.py:score", "broken.py:2: invalid syntax"),
        ("{dir}/raises.py:score", "raises.py:2: ValueError: no key"),
        ("{dir}/needs.py:score", "needs.py:1: ModuleNotFoundError: No module named 'no_such_library'"),
        ("{dir}/exits.py:score", "exits.py:2: SystemExit: 0"),
        ("{dir}/folder.py:score", "{dir}/folder.py is a folder; name a file"),
    ],
)
def test_a_reference_that_cannot_be_loaded_is_a_one_line_error(tmp_path: Path, text: str, message: str) -> None:
    written(tmp_path, "def score(): ...")
    written(tmp_path, "import json\nPOINTS = 3\n", "points.py")
    written(tmp_path, "\nx = = 1\n", "broken.py")
    written(tmp_path, "def score(): ...\nraise ValueError('no key')\n", "raises.py")
    written(tmp_path, "import no_such_library\n", "needs.py")
    written(tmp_path, "def score(): ...\nraise SystemExit(0)\n", "exits.py")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UserError) as result:
        load(text.format(dir=tmp_path), "reward.function")
    assert str(result.value).startswith("reward.function: ") and message.format(dir=tmp_path) in str(result.value)
    assert "\n" not in str(result.value)


def test_a_wrong_signature_is_an_error_with_the_attempted_call() -> None:
    def score(response: str, problem: object, sample: object, bonus: float = 0.0) -> float:
        return bonus

    check_call(score, ("response", "problem", "sample"), {"bonus": 1}, "reward.function")
    with pytest.raises(
        UserError,
        match=r"score\(response, problem, sample, bonus=0.0\) cannot be called as score\(response, problem, sample, malus=1\): .*malus",
    ):
        check_call(score, ("response", "problem", "sample"), {"malus": 1}, "reward.args")


def test_a_long_signature_is_shown_without_types_and_long_defaults() -> None:
    def judge(response: str, url: str, prompt: str = "a prompt of many lines " * 20, max_tokens: int = 512) -> float:
        return 0.0

    with pytest.raises(UserError) as result:
        check_call(judge, ("response",), {"url": "http://judge", "max_token": 5}, "reward.args")
    assert str(result.value) == (
        "reward.args: judge(response, url, prompt=…, max_tokens=512) cannot be called as judge(response, url='http://judge', max_token=5): "
        "got an unexpected keyword argument 'max_token'; did you mean max_tokens?"
    )


def test_an_error_is_located_in_the_users_file(tmp_path: Path) -> None:
    file = written(tmp_path, "import json\n\ndef score(text):\n    return json.loads(text)\n")
    score = load(f"{file}:score", "reward.function")
    assert callable(score)
    try:
        score("{")
    except ValueError as error:
        assert describe_error(error, f"{file}:score").startswith("judge.py:4: JSONDecodeError: Expecting property name")


def test_a_location_is_file_and_line_of_the_unwrapped_function(tmp_path: Path) -> None:
    text = "import functools\ndef plain(): ...\n@functools.cache\ndef kept(): ...\nclass Echo: ...\n"
    file = written(tmp_path, text, "places.py")
    assert location_of(load(f"{file}:plain", "f")) == "places.py:2"
    assert location_of(load(f"{file}:kept", "f")) == "places.py:3"
    assert location_of(load(f"{file}:Echo", "f")) == "places.py:5"


def test_the_location_of_an_object_without_source_is_its_name() -> None:
    assert location_of(len) == "len"
    assert location_of(3) == "int"
