"""`mtpctl init`: what it writes is a task that its own tests accept, and nothing is overwritten."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtpctl.cli.app import main
from mtpctl.cli.recipe import ABOUT, TEMPLATES
from mtpctl.recipe import yaml12
from tests.environment import with_tree

KINDS = ["exact", "judge", "tool", "agent", "coding"]


@pytest.fixture
def init(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`mtpctl init` in an empty folder: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["init", *arguments])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return call


def recipe_in(folder: Path) -> dict[str, Any]:
    value = yaml12.parse((folder / "recipe.yaml").read_text(), "recipe.yaml").value
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_template_is_written_with_the_name_of_the_task(init: Any, kind: str) -> None:
    code, out, err = init("sums", "--template", kind)
    assert (code, err) == (0, "")
    written = {path.name for path in Path("sums").iterdir()}
    own = {"tool": {"reward.py", "environment.py"}, "agent": {"agent.py", "talks.jsonl"}, "coding": {"agent.py"}}
    code_files = own.get(kind, {"reward.py"})
    assert written == {"recipe.yaml", "rows.jsonl", "held_out.jsonl", "test_sums.py", "README.md"} | code_files
    assert all(f"sums/{name}" in out for name in written)
    assert out.splitlines()[-1] == "next: mtpctl recipe validate sums/recipe.yaml"
    assert recipe_in(Path("sums"))["name"] == "sums"
    assert isinstance(recipe_in(Path("sums"))["train"]["sft"]["until_loss"], float)
    assert not [path.name for path in Path("sums").iterdir() if "mytask" in path.read_text()]


@pytest.mark.parametrize("kind", KINDS)
def test_tests_of_the_template_pass(init: Any, kind: str) -> None:
    init("sums", "--template", kind)
    environment = with_tree()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "sums"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_recipe_of_the_template_has_all_files_and_names(init: Any, kind: str) -> None:
    init("sums", "--template", kind)
    recipe, folder = recipe_in(Path("sums")), Path("sums")
    for reference in (recipe["reward"]["function"], recipe["rollout"].get("environment"), recipe["rollout"].get("agent")):
        if reference is not None and ":" in reference:
            file, _, name = reference.partition(":")
            assert f"def {name}(" in (folder / file).read_text() or f"class {name}" in (folder / file).read_text()
    columns = set(recipe["data"]["columns"].values())
    for file in (recipe["data"]["path"], recipe["data"]["eval_path"]):
        rows = [json.loads(line) for line in (folder / file).read_text().splitlines()]
        assert len(rows) >= 40 and all(columns <= row.keys() for row in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_rows_are_not_trained_on(kind: str) -> None:
    trained, stored = (
        {json.loads(line)["question"] for line in (TEMPLATES / kind / name).read_text().splitlines()}
        for name in ("rows.jsonl", "held_out.jsonl")
    )
    assert trained and stored and trained.isdisjoint(stored)


def test_name_with_a_dash_is_importable(init: Any) -> None:
    assert init("work/my-sums")[0] == 0
    assert (Path("work/my-sums") / "test_my_sums.py").is_file()
    assert recipe_in(Path("work/my-sums"))["name"] == "my-sums"


def test_init_does_not_overwrite_an_existing_folder(init: Any) -> None:
    Path("sums").mkdir()
    (Path("sums") / "notes").write_text("kept")
    code, out, err = init("sums")
    assert (code, out) == (2, "") and err == "error: init: sums exists and is not overwritten; name another folder\n"
    assert [path.name for path in Path("sums").iterdir()] == ["notes"]
    Path("file").write_text("kept")
    assert init("file")[0] == 2 and Path("file").read_text() == "kept"


def test_an_empty_folder_is_filled(init: Any) -> None:
    Path("sums").mkdir()
    assert init("sums")[0] == 0 and (Path("sums") / "recipe.yaml").is_file()


@pytest.mark.parametrize("arguments", [("1sums",), ("my sums",), ("file/sums",), ("sums", "--template", "nothing")])
def test_unusable_folder_is_a_one_line_error(init: Any, arguments: tuple[str, ...]) -> None:
    Path("file").write_text("kept")
    code, out, err = init(*arguments)
    assert code == 2 and not out and err and "Traceback" not in err
    assert sorted(path.name for path in Path().iterdir()) == ["file"]


def test_every_file_of_a_template_is_described() -> None:
    for kind in KINDS:
        assert {path.name for path in (TEMPLATES / kind).iterdir() if path.is_file()} < ABOUT.keys()
