"""`benchmarks/peers`: the reward equals reasoning-gym's full score, and the tables follow from the records."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mtpctl.data.problems import Problem
from mtpctl.recipe.loading import load_recipe
from mtpctl.samples import Sample

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"
TEMPLATE = Path(__file__).parents[2] / "mtpctl" / "templates" / "reasoning_gym" / "reward.py"


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def responses(answer: str, draw: random.Random) -> list[str]:
    """Right and wrong responses in the forms that the rules distinguish."""
    number = draw.choice(
        [answer, f"{answer}.0", f"+{answer}", f"0{answer}", f"{answer}1", f"-{answer}", f"${answer}$", f"**{answer}**", "x", ""]
    )
    return [
        f"The answer is {number}.",
        f"the final answer to this is: {number}\nDone.",
        f"The answer is 12 - 5 = {number}. Is it?",
        f"The answer is 1. No, the answer is {number}",
        f"{number} and then some",
        f"7, {number}",
        "I do not know",
        "",
    ]


def test_reward_is_one_exactly_if_the_score_of_reasoning_gym_is_full() -> None:
    own, template = load(FOLDER / "peer_reward.py", "peers_reward"), load(TEMPLATE, "template_reward")
    draw = random.Random(0)
    values = []
    for _ in range(400):
        answer = str(draw.randint(-2000, 2000))
        problem = Problem("rows.jsonl:1", "1 + 1 =", answer, fields={"metadata": {}})
        for response in responses(answer, draw):
            values.append(own.value(response, answer))
            assert values[-1] == template.score(response, problem, Sample("rows.jsonl:1", "group", [1]))["reward"], (response, answer)
    assert 0.1 < sum(values) / len(values) < 0.9


def test_score_is_logged_with_tokens_and_row(tmp_path: Path) -> None:
    own = load(FOLDER / "peer_reward.py", "peers_reward")
    problem = Problem("held_out.jsonl:3", "1 + 1 =", "2", fields={"split": "held_out", "key": "held_out/2", "in_training": True})
    sample = Sample("held_out.jsonl:3", "group", [1], response_ids=[5, 6, 7])
    log = tmp_path / "responses.jsonl"
    assert own.score("The answer is 2.", problem, sample, log=str(log)) == 1
    line = json.loads(log.read_text())
    assert line.pop("time") > 0
    assert line == {"split": "held_out", "key": "held_out/2", "in_training": True, "tokens": 3, "reward": 1.0}


def write(folder: Path, **files: list[dict[str, object]]) -> None:
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_tables_count_tokens_after_warmup_and_evaluations_by_row(tmp_path: Path) -> None:
    table = load(FOLDER / "table.py", "peers_table")
    (tmp_path / "run.json").write_text(json.dumps({"start": 1000.0}))
    train = [
        {"time": 1100.5 + i, "split": "train", "key": f"train/{i}", "in_training": True, "tokens": 10, "reward": 1.0} for i in range(10)
    ]
    held_out = [
        {
            "time": time + index / 10,
            "split": "held_out",
            "key": f"held_out/{index}",
            "in_training": index == 0,
            "tokens": 4,
            "reward": reward,
        }
        for time, rewards in ((1050.0, (1.0, 0.0, 0.0, 1.0)), (1110.0, (1.0, 1.0, 1.0, 0.0)), (1120.0, (1.0,)))
        for index, reward in enumerate(rewards)
    ]
    write(
        tmp_path,
        responses=[*train, *held_out],
        updates=[{"time": 1100.0 + 2 * number, "update": number} for number in range(1, 6)],
        gpu=[{"time": 1105.0, "memory_mib": 2048.0, "utilization": 60.0, "gpus": 2}],
    )
    run = table.read("peer", tmp_path)
    # Updates 2 and 5 end at 1104 and 1110: six responses of 10 tokens in six seconds on two GPUs.
    assert table.speed([run], 2).splitlines()[2:] == ["| peer | 102 | 3 | 2.00 (2.00 to 2.00) | 5 | 0.5 | 10.0 | 60% | 2.0 |"]
    assert table.learning([run]).splitlines()[2:] == [
        "| peer | 50 | 0 | 101 | 0 | 0 | 50.0 | 33.3 | 4.0 |",
        "| peer | 110 | 8 | 221 | 5 | 10 | 75.0 | 66.7 | 4.0 |",
    ]


def test_parts_of_an_update_are_medians_after_warmup(tmp_path: Path) -> None:
    table = load(FOLDER / "table.py", "peers_table")
    (tmp_path / "run.json").write_text(json.dumps({"start": 1000.0}))
    seconds = [(1, {"gen": 9.0}), (2, {"gen": 1.0, "step": 4.0}), (3, {"gen": 3.0, "step": 5.0}), (4, {"gen": 2.0, "step": 6.0})]
    write(tmp_path, responses=[], updates=[], gpu=[], parts=[{"update": number, "parts": parts} for number, parts in seconds])
    assert table.parts([table.read("peer", tmp_path)], 1).splitlines()[2:] == [
        "| peer | step | 3 | 5.000 (4.000 to 6.000) |",
        "| peer | gen | 3 | 2.000 (1.000 to 3.000) |",
    ]


def test_measure_records_parts_that_each_system_reports(tmp_path: Path) -> None:
    line = "(TaskRunnerV1 pid=7) step:4 - timing_s/gen:0.5 - timing_s/agent_loop/x:np.float64(2e-05) - timing_per_token_ms/gen:7.0"
    rows = [
        {"session": 1, "time": 1.0, "event": "start", "message": ""},
        {"session": 1, "time": 2.0, "phase": "rl", "step": 5, "timing_s/step": 1.5, "timing_s/update": 0.25, "perf/tokens": 3.0},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"session": 1, "ti'
    program = f"import pathlib; print({line!r}); pathlib.Path('run').mkdir(); pathlib.Path('run/metrics.jsonl').write_text({text!r})"
    out = tmp_path / "out"
    command = [sys.executable, str(FOLDER / "measure.py"), str(out), "--no-gpu", "--", sys.executable, "-c", program]
    subprocess.run(command, check=True, timeout=60)
    assert [json.loads(each) for each in (out / "parts.jsonl").read_text().splitlines()] == [
        {"update": 4, "parts": {"gen": 0.5, "agent_loop/x": 2e-05}},
        {"update": 5, "parts": {"step": 1.5, "update": 0.25}},
    ]


def test_score_of_trl_is_logged_per_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peer_reward", load(FOLDER / "peer_reward.py", "peers_reward"))
    own = load(FOLDER / "trl_reward.py", "peers_trl_reward")
    log = tmp_path / "responses.jsonl"
    rewards = own.score(
        prompts=[[], []],
        completions=[[{"role": "assistant", "content": f"The answer is {number}."}] for number in (2, 3)],
        completion_ids=[[5, 6, 7], [8]],
        answer=["2", "2"],
        split=["train", "train"],
        key=["train/0", "train/1"],
        in_training=[True, True],
        log=str(log),
    )
    assert rewards == [1.0, 0.0]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["key"], line["tokens"], line["reward"]) for line in lines] == [("train/0", 3, 1.0), ("train/1", 1, 0.0)]


@pytest.mark.parametrize("line", ["(TaskRunnerV1 pid=7) step:4 - actor/loss:0.1", "rl 4/200  reward 0.5", "\x1b[36mx\x1b[0m step:4 -"])
def test_measure_records_updates_of_each_system(line: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = f"print('start'); print({line!r})"
    command = [sys.executable, str(FOLDER / "measure.py"), str(out), "--no-gpu", "--", sys.executable, "-c", program]
    subprocess.run(command, check=True, timeout=60)
    assert [json.loads(each)["update"] for each in (out / "updates.jsonl").read_text().splitlines()] == [4]
    run = json.loads((out / "run.json").read_text())
    assert run["code"] == 0 and run["end"] > run["start"]


def test_recipe_of_the_first_hour_equals_that_of_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peer_reward", load(FOLDER / "peer_reward.py", "peers_reward"))
    prepare = load(FOLDER / "prepare.py", "peers_prepare")
    (tmp_path / "compared.yaml").write_text(
        prepare.recipe("sums", "MODEL", "", response=160, context=256, rate=3e-5, warmup=20, eval_every=20)
    )
    sets = ["name=sums", "run_dir=run", "reward={function: 'reward.py:score'}", "cluster.device=cuda"]
    compared, first = (load_recipe(file, sets=sets).recipe for file in (tmp_path / "compared.yaml", FOLDER / "first_hour" / "recipe.yaml"))
    assert first.model_dump(exclude={"data"}) == compared.model_dump(exclude={"data"})
    assert first.data.columns == compared.data.columns


def test_settings_of_peers_in_the_first_hour_equal_those_of_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peer_reward", load(FOLDER / "peer_reward.py", "peers_reward"))
    monkeypatch.setitem(sys.modules, "prepare", load(FOLDER / "prepare.py", "peers_prepare"))
    verl, trl = load(FOLDER / "run_verl.py", "peers_run_verl"), load(FOLDER / "run_trl.py", "peers_run_trl")
    options = argparse.Namespace(work="sums", mode="sync", folder=Path("/rows"), model="MODEL", attention="flash_attention_2", seed=0)
    options.gpu_memory, options.workers, options.eval_every, options.updates, options.set = 0.5, 8, 20, 200, []
    compared = dict(each.split("=", 1) for each in verl.arguments(options))
    words = (FOLDER / "first_hour" / "sums_verl.sh").read_text().split()
    first = dict(each.split("=", 1) for each in words if "=" in each)
    files = {"data.train_files", "data.val_files", "reward.custom_reward_function.path"}
    assert len(first) > 20 and {name: float_or_text(compared[name]) for name in first.keys() - files} == {
        name: float_or_text(value) for name, value in first.items() if name not in files
    }
    tree = ast.parse((FOLDER / "first_hour" / "sums_trl.py").read_text())
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "GRPOConfig")
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert len(arguments) > 20 and arguments.items() <= trl.colocated(options).items()


def float_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def test_first_hour_counts_lines_and_settings() -> None:
    first_hour = load(FOLDER / "first_hour.py", "peers_first_hour")
    recipe = "# a comment\nmodel:\n  path: MODEL\n\ntrain:\n  gpus: 0.4\n"
    assert (first_hour.count(recipe), first_hour.settings("recipe.yaml", recipe)) == (4, 2)
    command = "python3 -m package \\\n    a.b=1 \\\n    c=[d]\n"
    assert (first_hour.count(command), first_hour.settings("run.sh", command)) == (3, 2)
    script = "settings = Config(\n    a=1,\n    b='x',\n)\n"
    assert (first_hour.count(script), first_hour.settings("run.py", script)) == (4, 2)


@pytest.mark.parametrize("mistake", ["none", "data"])
def test_first_hour_runs_a_command_with_one_mistake(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    first_hour = load(FOLDER / "first_hour.py", "peers_first_hour")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "run.py").write_text("print('start')\nopen('rows.jsonl')\nprint('MODEL')\n")
    for name in ("rows.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("{}\n")
    system = first_hour.System(("run.py",), {"data": ("rows.jsonl", "row.jsonl")}, ("{python} run.py",))
    monkeypatch.setattr(first_hour, "FILES", tmp_path / "files")
    monkeypatch.setitem(first_hour.SYSTEMS, "trl", system)
    options = argparse.Namespace(system="trl", python=Path(sys.executable), rows=tmp_path, model=tmp_path / "model", only=[mistake])
    options.cpu, options.seconds, options.show = False, 60.0, 1
    first_hour.messages(options)
    code, shown = capsys.readouterr().out.splitlines()[1:]
    if mistake == "none":
        assert code.startswith("exit code 0,") and shown == f"  {tmp_path / 'model'}"
    else:
        assert code.startswith("exit code 1,") and shown.endswith("No such file or directory: 'row.jsonl'")
