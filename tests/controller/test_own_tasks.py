"""User-defined tasks in whole runs of `mtpctl train`: with the drafter, every sync compared, old log-probs from servers, resumed once.

Each case is a folder as a user would have it: rows, code and a recipe that names them. Nothing of mtpctl is edited or imported otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from mtpctl.convert.hf_folder import create_hf_folder
from mtpctl.data.tokenizers import make_byte_tokenizer
from tests.environment import with_tree
from tests.fakes.judge import Judge

# Two starts of trainer, engine and server each: two minutes on two cores, most of it imports.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = (
    "train.checkpoint_every=1",
    "train.eval_every=2",
    "train.rl.prompts_per_step=4",
    "train.rl.group_size=2",
    "train.rl.dynamic_sampling=false",
    "sync.verify=always",
    "logprob.standalone=true",
    "cluster.num_cpus=4",
    "telemetry.samples=4",
)
MACHINE: dict[str, Any] = {
    "model": {
        "init": "random",
        "config": {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 256,
            "vocab_size": 320,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 256,
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False,
            "bos_token_id": 257,
            "eos_token_id": 258,
            "pad_token_id": 256,
        },
    },
    "train": {
        "stages": ["sft", "rl"],
        "precision": "fp32",
        "threads": 1,
        "tokens_per_microbatch": 2048,
        "sft": {"steps": 120, "batch_size": 8, "until_loss": 0.1, "optimizer": {"lr": 5e-3}},
    },
    "rollout": {"engine": "vllm", "eager": True, "kv_cache_bytes": 64 << 20, "max_in_flight": 16, "threads": 1},
    "sync": {"transport": "shm"},
    "cluster": {"device": "cpu"},
}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token if m.role == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LOSS = """\
from torch import Tensor

from mtpctl.recipe.rl import RlConfig
from mtpctl.rl.losses import LossOut, TokenTerms, log_ratio_of, loss_from


def loss(logprob: Tensor, entropy: Tensor | None, terms: TokenTerms, config: RlConfig, weight: float = 0.5) -> LossOut:
    log_ratio = log_ratio_of(logprob, terms)
    surrogate = -terms.advantage * log_ratio.exp() + weight * log_ratio**2
    return loss_from(surrogate, logprob, entropy, terms, config, {"kept": (terms.aggregation > 0).sum()})
"""
AGAIN = """\
class Again:
    stop = []

    def __init__(self, problem, times):
        self.left = times if problem.fields.get("source") == "mine" else 0

    async def reply(self, turn):
        self.left -= 1
        return [{"role": "user", "content": "sure?"}] if self.left >= 0 else None
"""
MINE = """\
def score(response, problem, sample):
    return {"reward": len(response) % 2, "letters": len(response)}
"""
QUESTION = "Ann has {} bags of {} apples. How many apples has she?"

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """A task in a folder: its recipe, what `--set` adds, and what must be true of the metrics of its updates and of its evaluations."""

    recipe: Path
    holds: Callable[[Rows, Rows], None]
    sets: tuple[str, ...] = ()
    samples: Callable[[Rows], None] = field(default=lambda rows: None)


ENVIRONMENT = with_tree()


def mtpctl(cwd: Path, *arguments: object) -> str:
    """What a command prints that a user would give in the folder `cwd`."""
    command = [sys.executable, "-m", "mtpctl", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def write_rows(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_recipe(folder: Path, tree: dict[str, Any]) -> Path:
    """The toy model's recipe with the sections of the task laid over its own, as an overlay of one level."""
    merged = {**MACHINE, "name": "own", **{key: {**MACHINE.get(key, {}), **value} for key, value in tree.items()}}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(merged))
    return path


@contextlib.contextmanager
def judging(*script: tuple[int, str]) -> Iterator[str]:
    """The URL of a judge that replies by this script of statuses and texts."""
    server = Judge(*script)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def judged(folder: Path) -> Iterator[Task]:
    """Chat messages in prompts and replies, an HTTP judge, a user-defined loss, and two held-out sets of which one has GSM8K's columns."""
    make_byte_tokenizer(folder / "tokenizer")
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    for name, text in (("loss.py", LOSS), ("again.py", AGAIN), ("mine.py", MINE)):
        (folder / name).write_text(text)
    ask = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say yes."}]
    chat = [{"talk": ask, "gold": "yes", "source": "mine"} for _ in range(8)]
    write_rows(folder / "chat.jsonl", chat)
    write_rows(folder / "held.jsonl", chat[:3])
    write_rows(folder / "gsm8k.jsonl", [{"question": QUESTION.format(n, 2), "answer": f"{n} * 2\n#### {2 * n}"} for n in range(1, 4)])
    draw = random.Random(0)
    scores = [(200, f"Score: {draw.random():.2f}") for _ in range(10_000)]
    with judging((503, "busy"), *scores) as url:
        recipe = write_recipe(
            folder,
            {
                "model": {"tokenizer": str(folder / "tokenizer")},
                "data": {"path": "chat.jsonl", "columns": {"prompt": "talk", "answer": "gold"}, "chat_template": True},
                "reward": {"function": "llm_judge", "args": {"url": url, "model": "any"}},
                "train": {**MACHINE["train"], "rl": {"steps": 2, "loss": "loss.py:loss", "loss_args": {"weight": 0.1}}},
                "rollout": {"environment": "again.py:Again", "environment_args": {"times": 1}, "max_tokens": 40},
                "evaluation": {
                    "sets": {
                        "chat": {"path": "held.jsonl", "n": 2, "reward": {"function": "mine.py:score"}},
                        "gsm8k": {"path": "gsm8k.jsonl", "columns": {"prompt": "question"}, "reward": {"function": "exact"}},
                    }
                },
            },
        )

        def holds(updates: Rows, evaluations: Rows) -> None:
            assert all(row["actor/kept"] == 1.0 for row in updates), "the own loss counts each trained token once"
            assert all(0 < row["reward/mean"] < 1 and row["reward/errors"] == 0 for row in updates)
            assert all(row["environment/turns"] > 0 and row["environment/errors"] == 0 for row in updates)
            for row in evaluations:
                assert {"eval/chat/avg@2", "eval/chat/pass@2", "eval/gsm8k/avg@1"} <= row.keys()

        def samples(rows: Rows) -> None:
            requested = [row for row in rows if len(row["parts"]) > 1]
            assert requested and {row["parts"][1]["text"] for row in requested} == {"<user>sure?\n<assistant>"}
            prompts = {row["prompt"] for row in rows if row["set"] != "gsm8k"}
            assert prompts == {"<system>Be short.\n<user>Say yes.\n<assistant>"}

        yield Task(recipe, holds, samples=samples)


@contextlib.contextmanager
def coded(folder: Path) -> Iterator[Task]:
    """The reward `code` and the environment `python`, of two turns: the model computes, reads what came out, and writes a function."""
    solution = "<python>2*2</python><output>\n4\n</output>\n```python\ndef double(n): return 2*n\n```"
    row = {"prompt": "double(2):", "tests": ["assert double(2) == 4", "assert double(0) == 0"], "solution": solution}
    write_rows(folder / "rows.jsonl", [row] * 8)
    recipe = write_recipe(
        folder,
        {
            "model": {"tokenizer": "bytes"},
            "data": {"path": "rows.jsonl", "columns": {"answer": None}},
            "reward": {"function": "code", "args": {"partial": True}},
            "train": {**MACHINE["train"], "rl": {"steps": 2}},
            "rollout": {"environment": "python", "max_tokens": 128, "max_turns": 3},
        },
    )

    def holds(updates: Rows, evaluations: Rows) -> None:
        assert all(row["reward/errors"] == 0 and row["environment/errors"] == 0 for row in updates)
        assert any(row["reward/passed"] > 0 for row in updates), "programs that the model wrote pass their tests"
        assert all(row["environment/turns"] > 0 for row in updates)

    def samples(rows: Rows) -> None:
        assert any("<output>\n4\n</output>" in part["text"] for row in rows for part in row["parts"] if part["by"] == "environment")

    yield Task(recipe, holds, samples=samples)


@contextlib.contextmanager
def gsm8k(folder: Path) -> Iterator[Task]:
    """What `mtpctl init` writes, with rows of GSM8K's format instead of its rows, as docs/your-own-task.md says."""
    task = folder / "mytask"
    mtpctl(folder, "init", "mytask")
    rows = [
        {"question": QUESTION.format(n, m), "answer": f"{n} bags of {m} are {n} * {m} = {n * m}.\n#### {n * m}"}
        for n in range(2, 10)
        for m in range(2, 10)
    ]
    write_rows(task / "rows.jsonl", rows[:-8])
    write_rows(task / "held_out.jsonl", rows[-8:])

    def holds(updates: Rows, evaluations: Rows) -> None:
        assert all(row["reward/errors"] == 0 for row in updates)
        assert all(row["eval/problems"] == 8 for row in evaluations)

    sets = ("reward.function=exact", "reward.args={}", "rollout.max_tokens=64", "train.sft.steps=20", "train.rl.steps=2")
    yield Task(task / "recipe.yaml", holds, sets)


@contextlib.contextmanager
def tool(folder: Path) -> Iterator[Task]:
    """What `mtpctl init --template tool` writes, with fewer steps."""
    mtpctl(folder, "init", "mytask", "--template", "tool")

    def holds(updates: Rows, evaluations: Rows) -> None:
        assert all(row["environment/errors"] == 0 and row["reward/errors"] == 0 for row in updates)
        assert any(row["reward/called"] > 0 for row in updates)

    yield Task(folder / "mytask" / "recipe.yaml", holds, ("train.sft.steps=60", "train.rl.steps=2"))


@contextlib.contextmanager
def judge(folder: Path) -> Iterator[Task]:
    """What `mtpctl init --template judge` writes, with a server in the place of its stand-in and fewer steps."""
    mtpctl(folder, "init", "mytask", "--template", "judge")

    def holds(updates: Rows, evaluations: Rows) -> None:
        assert all(row["reward/errors"] == 0 and 0.2 < row["reward/mean"] < 0.9 for row in updates), "the server's grades, and no others"

    draw = random.Random(0)
    grades = [(200, str(draw.randint(2, 9))) for _ in range(10_000)]
    with judging(*grades) as url:
        sets = (f"reward.args={{url: '{url}', model: any}}", "train.sft.steps=20", "train.rl.steps=2")
        yield Task(folder / "mytask" / "recipe.yaml", holds, sets)


@contextlib.contextmanager
def agent(folder: Path) -> Iterator[Task]:
    """What `mtpctl init --template agent` writes, with fewer steps of RL: a call that a model less trained writes is seldom well formed."""
    mtpctl(folder, "init", "mytask", "--template", "agent")

    def holds(updates: Rows, evaluations: Rows) -> None:
        assert all(row["environment/errors"] == row["environment/timeouts"] == row["environment/rewritten"] == 0 for row in updates)
        assert all(row["reward/calls"] > 0 for row in updates), "tools were called"
        assert all(row["environment/samples"] == 1 for row in updates), "each answer goes on from the tokens of the ones before"
        assert all(row["eval/problems"] > 0 for row in evaluations)

    def samples(rows: Rows) -> None:
        said = [part["text"] for row in rows for part in row["parts"] if part["by"] == "environment"]
        assert said and all(re.fullmatch(r"(tool: .*\n)+assistant: ", text) for text in said)

    yield Task(folder / "mytask" / "recipe.yaml", holds, ("train.rl.steps=2",), samples)


@contextlib.contextmanager
def coding(folder: Path) -> Iterator[Task]:
    """What `mtpctl init --template coding` writes, with fewer steps."""
    mtpctl(folder, "init", "mytask", "--template", "coding")

    def holds(updates: Rows, evaluations: Rows) -> None:
        assert all(row["environment/errors"] == row["environment/timeouts"] == row["environment/rewritten"] == 0 for row in updates)
        assert all(1 < row["environment/turns"] <= 2 and row["environment/samples"] == 1 for row in updates)
        assert any(row["reward/passed"] > 0 for row in updates), "programs that the model wrote pass their hidden tests"

    def samples(rows: Rows) -> None:
        said = [part["text"] for row in rows for part in row["parts"] if part["by"] == "environment"]
        assert said and all(re.fullmatch(r"user: .*, not '.*':\nassistant: ", text) for text in said)

    sets = ("train.sft.steps=150", "train.sft.until_loss=0.2", "train.rl.steps=2", "train.rl.prompts_per_step=8")
    yield Task(folder / "mytask" / "recipe.yaml", holds, sets, samples)


@contextlib.contextmanager
def verifiers(folder: Path) -> Iterator[Task]:
    """An environment of the package verifiers, of several turns, with its own problems, held-out problems and rewards."""
    pytest.importorskip("verifiers.v1", reason="the extra verifiers is not installed")
    for name in ("guess_number.py", "last_letter.py"):
        shutil.copy(Path(__file__).parents[1] / "environments" / "tasksets" / name, folder)
    games = [["5"], ["3", "higher", "5"], ["7", "lower", "5", "lower", "4"], ["2", "higher", "6"]]
    talks = [
        [{"role": "system", "content": "Guess."}, {"role": "user", "content": "a number from 1 to 8?"}]
        + [{"role": ("assistant", "user")[place % 2], "content": said} for place, said in enumerate(game)]
        for game in games
    ]
    write_rows(folder / "games.jsonl", [{"messages": talk} for talk in talks] * 8)
    recipe = write_recipe(
        folder,
        {
            "model": {"tokenizer": "bytes"},
            "data": {"sft_path": "games.jsonl", "taskset": {"eval_size": 2}, "chat_template": True},
            "reward": {"function": "environment"},
            "train": {**MACHINE["train"], "rl": {"steps": 2}},
            "rollout": {"environment": "verifiers:guess_number", "max_tokens": 160, "max_turns": 6, "deadline_s": 120.0},
        },
    )

    def holds(updates: Rows, evaluations: Rows) -> None:
        assert all(row["environment/errors"] == row["environment/timeouts"] == row["environment/rewritten"] == 0 for row in updates)
        assert all(row["environment/samples"] == 1 and row["environment/turns"] > 1 for row in updates)
        assert all(row["reward/guessed"] == row["reward/mean"] for row in updates) and any(row["reward/mean"] > 0 for row in updates)
        assert evaluations and all(row["eval/problems"] == 2 for row in evaluations)

    def samples(rows: Rows) -> None:
        said = {part["text"] for row in rows for part in row["parts"] if part["by"] == "environment"}
        assert said and said <= {f"user: {word}\nassistant: " for word in ("higher", "lower")}
        assert {row["prompt"] for row in rows} == {"system: Guess.\nuser: a number from 1 to 8?\nassistant: "}

    yield Task(recipe, holds, samples=samples)


@contextlib.contextmanager
def documented(folder: Path) -> Iterator[Task]:
    """The whole example of docs/verifiers.md, which verifiers' harness `null` plays in a process for each episode."""
    pytest.importorskip("verifiers.v1", reason="the extra verifiers is not installed")
    page = (Path(__file__).parents[2] / "docs" / "verifiers.md").read_text().partition("## A whole example")[2]
    blocks = dict(re.findall(r"^```(python|yaml)\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE))
    (folder / "letters.py").write_text(blocks["python"])
    (folder / "letters.yaml").write_text(blocks["yaml"])
    mtpctl(folder, "init", "words")

    def holds(updates: Rows, evaluations: Rows) -> None:
        assert all(row["environment/errors"] == row["environment/timeouts"] == 0 for row in updates)
        assert all(row["environment/turns"] == 1 and row["reward/letters"] > 0 for row in updates)
        assert all(row["reward/right"] == row["reward/mean"] for row in updates) and any(row["reward/right"] > 0 for row in updates)
        assert evaluations and all(row["eval/problems"] == 16 for row in evaluations)

    yield Task(folder / "letters.yaml", holds, ("train.rl.steps=2",))


@contextlib.contextmanager
def taught(folder: Path) -> Iterator[Task]:
    """The plain template under a teacher that the run serves: a model of other random weights, whose likeliest tokens are compared."""
    mtpctl(folder, "init", "mytask", "--template", "exact")
    config = {**MACHINE["model"]["config"], "num_hidden_layers": 1}
    create_hf_folder(config, folder / "teacher", seed=5)

    def holds(updates: Rows, evaluations: Rows) -> None:
        assert all(row["teacher/kl"] > 0 and row["actor/teacher_kl"] > 0 for row in updates)

    sets = (f"train.rl.teacher={{path: {folder / 'teacher'}, topk: 4, hint: '{{prompt}}{{answer}}'}}", "train.sft.steps=20")
    yield Task(folder / "mytask" / "recipe.yaml", holds, (*sets, "train.rl.steps=2"))


@pytest.mark.parametrize(
    "task", [judged, coded, gsm8k, tool, judge, agent, coding, taught, verifiers, documented], ids=lambda task: task.__name__
)
def test_user_defined_task_trains_and_resumes(task: Callable[[Path], contextlib.AbstractContextManager[Task]], tmp_path: Path) -> None:
    with task(tmp_path) as own:
        run_dir = tmp_path / "runs" / "own"
        sets = [part for text in (*SMALL, *own.sets, f"run_dir={run_dir}") for part in ("--set", text)]
        mtpctl(tmp_path, "recipe", "validate", own.recipe, *sets)
        mtpctl(tmp_path, "train", own.recipe, "--plain", *sets)
        resumed = mtpctl(tmp_path, "train", own.recipe, "--plain", *sets, "--set", "train.rl.steps=3")
    assert "resume: rl resumes after step 2" in resumed
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row.get("phase") == "rl" and "actor/pg_loss" in row]
    assert [row["step"] for row in updates] == [1, 2, 3], "the second start goes on where the first one ended"
    assert all(row["sync/verified"] > 0 and row["mtp/loss_1"] > 0 for row in updates)
    assert sum(row["rollout/spec_drafted"] for row in updates) > 0 and sum(row["timing_s/reward"] for row in updates) > 0
    same = [row["rollout_corr/abs_diff_same_version"] for row in updates if "rollout_corr/abs_diff_same_version" in row]
    assert same and max(same) < 1e-4, "the server's log-probs are the engine's where both have the same weights"
    evaluations = [row for row in rows if "eval/version" in row]
    own.holds(updates, evaluations)
    own.samples([json.loads(line) for file in sorted((run_dir / "samples").iterdir()) for line in file.read_text().splitlines()])


STUCK = """\
import time
from pathlib import Path

HERE = Path(__file__).parent


def score(response, problem, sample):
    if problem.fields["stuck"] == "reward" and any(span.version > 1 for span in sample.version_spans):
        (HERE / "reward-hangs").touch()
        time.sleep(1000)
    return len(response) % 2


class Hangs:
    stop = ["e"]

    def __init__(self, problem):
        self.stuck = problem.fields["stuck"] == "environment"

    def reply(self, turn):
        if self.stuck and (HERE / "reward-hangs").exists():
            (HERE / "environment-hangs").touch()
            time.sleep(1000)
        return "!"
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_stop_does_not_wait_for_hanging_user_code(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    kinds = ["", "", "", "reward", "", "", "", "environment"]
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{n}:", "answer": "eee", "stuck": kind} for n, kind in enumerate(kinds)])
    recipe = write_recipe(
        tmp_path,
        {
            "model": {"tokenizer": "bytes"},
            "data": {"path": "rows.jsonl"},
            "reward": {"function": "stuck.py:score", "timeout_s": 900},
            "train": {**MACHINE["train"], "rl": {"steps": 500}},
            "rollout": {"environment": "stuck.py:Hangs", "max_tokens": 24, "deadline_s": 900},
            "async": {"staleness_threshold": 4.0},
        },
    )
    sets = [part for text in (*SMALL, "logprob.standalone=false", "train.sft.steps=30") for part in ("--set", text)]
    command = [sys.executable, "-m", "mtpctl", "train", str(recipe), "--plain", *sets, "--set", f"run_dir={tmp_path}/run"]
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        end = time.monotonic() + 200
        while not all((tmp_path / f"{kind}-hangs").exists() for kind in ("reward", "environment")):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        stopped = time.monotonic()
        os.killpg(process.pid, number)
        assert process.wait(120) == 128 + number, log.read_text()
        print(f"stopped after {time.monotonic() - stopped:.1f} s")
    finally:
        process.kill()
    # A step, its checkpoint and the end of actors; the sleeps would be a quarter of an hour.
    assert time.monotonic() - stopped < 60, log.read_text()
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert "Traceback" not in log.read_text()
