"""What each command prints, and what it exits with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.recipe.loading import load_recipe
from tests.fakes.commands import mtpctl as mtpctl
from tests.fakes.runs import sparse_folder
from tests.fakes.toys import TOYS


def test_recipes_and_overlays_are_listed_with_their_descriptions(mtpctl: Any) -> None:
    rows = {row["name"]: row for row in json.loads(mtpctl("recipe", "ls", "--json").out)}
    assert rows["tiny_mtp"]["kind"] == "recipe" and rows["h200x2"]["kind"] == "overlay"
    message = mtpctl("recipe", "ls").out
    for row in rows.values():
        assert row["about"] and row["about"] in message


def test_show_prints_set_keys_and_resolved_prints_all(mtpctl: Any) -> None:
    from mtpctl.recipe import yaml12

    said = yaml12.parse(mtpctl("recipe", "show", "tiny_mtp", "--set", "seed=9").out, "shown").value
    assert said["seed"] == 9 and "logprob" not in said
    resolved = json.loads(mtpctl("recipe", "show", "tiny_mtp", "--resolved", "--json").out)
    assert resolved == load_recipe("tiny_mtp").recipe.model_dump(mode="json", by_alias=True)


def test_show_origin_prints_the_source_of_each_value(mtpctl: Any) -> None:
    message = json.loads(mtpctl("recipe", "show", "tiny_mtp", "--resolved", "--origin", "--json", "--set", "seed=9").out)
    assert message["seed"] == {"value": 9, "origin": "--set"}
    assert message["logprob.standalone"]["origin"] == "default"
    assert message["sync.transport"]["origin"].rsplit(":", 1)[0].endswith("tiny_mtp.yaml")
    lines = mtpctl("recipe", "show", "tiny_mtp", "--origin", "--set", "seed=9").out.splitlines()
    assert any(line.startswith("seed: 9 ") and line.endswith("# --set") for line in lines)


def test_schema_is_json_schema_that_accepts_our_recipes(mtpctl: Any) -> None:
    import jsonschema

    schema = json.loads(mtpctl("recipe", "schema").out)
    jsonschema.validate(load_recipe("tiny_mtp").recipe.model_dump(mode="json", by_alias=True), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"sed": 1}, schema)


def test_validate_accepts_and_rejects_recipes(mtpctl: Any) -> None:
    assert mtpctl("recipe", "validate", "tiny_mtp").out.endswith("tiny_mtp.yaml: ok\n")
    message = json.loads(mtpctl("recipe", "validate", "mimo7b_mtp", "--overlay", "h200x2", "--json").out)
    assert message["ok"] and len(message["sources"]) == 2
    wrong = mtpctl("recipe", "validate", "tiny_mtp", "--set", "run_dir=x/{y}")
    assert (wrong.code, wrong.out) == (2, "")
    assert wrong.err == "error: run_dir: {y} is not a placeholder; only {name} and {seed} are replaced\n"


@pytest.mark.parametrize("command", [("recipe", "validate", "tiny_mtp"), ("train", "tiny_mtp", "--dry-run", "--set", "cluster.num_cpus=8")])
def test_user_defined_loss_is_tried_and_its_error_has_file_and_line(mtpctl: Any, command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from mtpctl.rl.losses import token_policy_loss\n\ndef right(*tokens):\n    return token_policy_loss(*tokens)\n\n"
        "def wrong(logprob, entropy, terms, config):\n    return logprob.sum() / len(terms)\n"
    )
    assert mtpctl(*command, "--set", f"train.rl.loss={tmp_path}/mine.py:right").code == 0
    message = mtpctl(*command, "--set", f"train.rl.loss={tmp_path}/mine.py:wrong")
    assert (message.code, bool(message.out)) == (2, command[0] == "train")  # a dry run shows its table in any case
    assert message.err == "error: train.rl.loss: mine.py:7: TypeError: object of type 'TokenTerms' has no len()\n"
    assert mtpctl(*command, "--set", f"train.rl.loss={tmp_path}/mine.py:wrong", "--set", "train.stages=[sft]").code == 0


def test_diff_prints_differing_keys(mtpctl: Any, tmp_path: Path) -> None:
    changed = tmp_path / "b.yaml"
    changed.write_text(Path(load_recipe("tiny_mtp").sources[0]).read_text().replace("seed: 0", "seed: 5"))
    assert mtpctl("recipe", "diff", "tiny_mtp", str(changed)).out == "seed: 0 → 5\n"
    assert json.loads(mtpctl("recipe", "diff", "tiny_mtp", str(changed), "--json").out) == {"seed": {"first": 0, "second": 5}}
    assert mtpctl("recipe", "diff", "tiny_mtp", "tiny_mtp").out == ""


@pytest.mark.parametrize("arguments", [["tiny_mtp"], ["mimo7b_mtp"], ["mimo7b_mtp", "--overlay", "h200x2"]])
def test_dry_run_lists_every_actor_and_starts_nothing(mtpctl: Any, arguments: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ["train", *arguments, "--dry-run", "--set", f"run_dir={run_dir}", "--set", "cluster.num_cpus=8"]
    plan = json.loads(mtpctl(*arguments, "--json").out)
    assert plan["model"]["parameters"]["total"] > plan["model"]["parameters"]["mtp"] > 0
    assert {"trainer_rank", "rollout_rank"} <= set(plan["memory"])
    assert set(plan["buckets"]) == {"target", "draft"}
    message = mtpctl(*arguments).out
    for actor in plan["placement"]["actors"]:
        assert actor["name"] in message and actor["role"] in message
    assert not run_dir.exists()


def test_end_tokens_are_listed_with_their_sources(mtpctl: Any) -> None:
    sets = ["--set", "model.config.eos_token_id=[258, 35]", "--set", "rollout.stop_ids=[42]"]
    tokens = ["258 '<eos>' (tokenizer, config.json, chat template)", "35 '#' (config.json)", "42 '*' (rollout.stop_ids)"]
    assert mtpctl("recipe", "show", "tiny_mtp", *sets).out.splitlines()[-3:] == [f"# end token {token}" for token in tokens]
    text = mtpctl("train", "tiny_mtp", "--dry-run", *sets).out
    assert f"end tokens {tokens[0]}" in text and all(f"           {token}" in text for token in tokens[1:])
    listed = json.loads(mtpctl("train", "tiny_mtp", "--dry-run", "--json", *sets).out)["end_tokens"]
    assert [(token["id"], token["sources"]) for token in listed][1:] == [
        (35, ["config.json"]),
        (42, ["rollout.stop_ids"]),
    ]


def test_dry_run_shows_the_number_of_engines_that_may_join(mtpctl: Any) -> None:
    command = ("train", "tiny_mtp", "--dry-run", "--set", "rollout.replicas={min: 1, max: 3}", "--set")
    assert "1 are planned, and up to 3 join; now there is room for 3" in mtpctl(*command, "cluster.num_cpus=4").out
    short = mtpctl(*command, "cluster.num_cpus=3", "--json")
    assert json.loads(short.out)["placement"]["engines"] == {"min": 1, "max": 3, "room": 2}
    assert short.code == 4 and "lower rollout.replicas.max: 3" in short.err


@pytest.mark.parametrize(
    ("recipe", "sets", "drafter"),
    [
        ("tiny_mtp", (), "1 MTP layer; vLLM drafts with the MTP layer, repeated for each further draft token"),
        (
            "tiny_mtp",
            ("--set", "rollout.speculation.num_tokens=0"),
            "1 MTP layer; vLLM drafts with nothing: rollout.speculation.num_tokens is 0",
        ),
        ("tiny_mtp", ("--set", "rollout.speculation.method=ngram"), "1 MTP layer; vLLM drafts with ngram"),
        ("qwen3_5_35b_a3b_mtp", ("--set", "model.path=Qwen/Qwen3.6-35B-A3B"), "1 MTP layer; vLLM drafts with the MTP layer"),
        ("ernie4_5_21b_a3b_mtp", (), "1 MTP layer; vLLM drafts with the MTP layer"),
        ("mimo_v2_flash_mtp", (), "3 MTP layers; vLLM drafts with each MTP layer at its depth on GPUs"),
        ("nemotron_3_5_lightning_mtp", (), "1 MTP layer; vLLM drafts with the MTP layer"),
        ("glm4_7_flash_mtp", (), "1 MTP layer; vLLM drafts with the MTP layer"),
        ("glm4_5_air_mtp", ("--set", "model.path=zai-org/GLM-4.7"), "1 MTP layer; vLLM drafts with the MTP layer"),
    ],
)
def test_dry_run_names_the_drafter(mtpctl: Any, recipe: str, sets: tuple[str, ...], drafter: str) -> None:
    assert f"drafter    {drafter}" in mtpctl("train", recipe, "--dry-run", "--set", "cluster.num_cpus=8", *sets).out


def test_dry_run_of_an_unsupported_hub_model_names_an_alternative_without_a_download(mtpctl: Any) -> None:
    message = mtpctl("train", "mimo7b_mtp", "--dry-run", "--set", "model.path=zai-org/GLM-5")
    assert message.code == 2
    assert message.err == (
        "error: zai-org/GLM-5: GLM-5 is not supported: the trainer has no sparse attention with an indexer; use GLM-4.7 or GLM-4.7-Flash\n"
    )


def test_dry_run_shows_the_bytes_of_routes(mtpctl: Any) -> None:
    command = ("train", "qwen3_5_35b_a3b_mtp", "--dry-run", "--set", "cluster.num_cpus=8")
    plan = json.loads(mtpctl(*command, "--json").out)
    assert plan["routes"]["token"] == 320 and plan["routes"]["batch"] % plan["routes"]["sample"] == 0
    assert "routes     train.moe.replay: rollout; 320 B a token, up to " in mtpctl(*command).out
    assert "routes" not in json.loads(mtpctl("train", "tiny_mtp", "--dry-run", "--json").out)


def test_a_dry_run_of_a_deterministic_run_shows_no_staleness(mtpctl: Any) -> None:
    message = mtpctl("train", "tiny_mtp", "--dry-run", "--set", "async.deterministic=true", "--set", "cluster.num_cpus=8").out
    assert "staleness threshold 0, old log-probs recomputed by Megatron\n" in message


@pytest.mark.parametrize(
    "command", [("train", "tiny_mtp", "--dry-run", "--set", "cluster.num_cpus=8"), ("sync-weights", "tiny_mtp", "--plan")]
)
def test_plan_of_an_adapter_sync_shows_the_base_weights_of_the_first(mtpctl: Any, command: tuple[str, ...]) -> None:
    message = mtpctl(*command, "--set", "train.lora={rank: 4}", "--set", "sync.sections=[adapter, draft]").out
    assert "at the first sync also" in message and " target" not in message
    assert "at the first sync" not in mtpctl(*command).out


@pytest.mark.parametrize(
    "command", [("train", "tiny_mtp", "--dry-run", "--set", "cluster.num_cpus=8"), ("sync-weights", "tiny_mtp", "--plan")]
)
def test_plan_of_a_delta_sync_shows_its_bytes_and_the_copy(mtpctl: Any, command: tuple[str, ...]) -> None:
    assert "later syncs send" not in mtpctl(*command).out
    bf16 = (*command, "--set", "sync.delta=true", "--set", "train.precision=bf16")
    message = mtpctl(*bf16).out
    assert "later syncs send " in message and "if 1% of the elements change; trainer rank 0 keeps a copy of 3." in message
    plan = json.loads(mtpctl(*bf16, "--json").out)
    complete = sum(bucket["bytes"] for bucket in plan["buckets"].values()) if "buckets" in plan else plan["bytes"]
    assert plan["delta"]["copy"] == complete and 0.018 * complete < plan["delta"]["nbytes"] < 0.025 * complete
    fp32 = mtpctl(*command, "--set", "sync.delta=true", "--set", "train.precision=fp32").out
    assert "later syncs send 7." in fp32 and "because all elements change in fp32" in fp32


@pytest.mark.parametrize(
    "command", [("train", "tiny_mtp", "--dry-run", "--set", "cluster.num_cpus=8"), ("sync-weights", "tiny_mtp", "--plan")]
)
def test_plan_shows_that_syncs_retain_the_kv_cache(mtpctl: Any, command: tuple[str, ...]) -> None:
    line = "requests in flight at a sync keep the KV cache of the old weights (sync.kv: keep)"
    assert line not in mtpctl(*command).out
    assert line in mtpctl(*command, "--set", "sync.kv=keep").out
    assert json.loads(mtpctl(*command, "--set", "sync.kv=keep", "--json").out)["kv"] == "keep"


@pytest.mark.parametrize(
    "command", [("train", "tiny_mtp", "--dry-run", "--set", "cluster.num_cpus=8"), ("sync-weights", "tiny_mtp", "--plan")]
)
def test_plan_shows_relays(mtpctl: Any, command: tuple[str, ...]) -> None:
    stored = (*command, "--set", "sync.transport=storage", "--set", "sync.url=s3://bucket/run")
    line = "hosts of engines download in a chain, and only the first one from the store (sync.relay)"
    assert line not in mtpctl(*stored).out
    assert line in mtpctl(*stored, "--set", "sync.relay=true").out
    assert json.loads(mtpctl(*stored, "--set", "sync.relay=true", "--json").out)["relay"] is True


def test_bench_of_syncs_lists_the_transports_that_it_measures(mtpctl: Any) -> None:
    command = ("bench", "sync-weights", "--transport")
    message = mtpctl(*command, "storage")
    assert message.code == 2 and "storage is not supported, because its speed depends on the object store" in message.err
    assert "must be one of shm, ipc, nccl, got tcp" in mtpctl(*command, "tcp").err


@pytest.mark.parametrize(
    ("sets", "code", "table"),
    [
        (["trian.rl.steps=1"], 2, False),
        (["rollout.kv_cache_bytes=1024"], 2, True),
        (["cluster.num_cpus=1"], 4, True),
        (["telemetry.wandb=project"], 3, True),
        (["rollout.engine_args={foo: 1}"], 2, True),
        (["data.task=null", "data.path=FOLDER/wrong.jsonl"], 2, True),
        (["run_dir=/proc/no/place"], 2, True),
    ],
)
def test_dry_run_reports_errors_below_its_table(
    mtpctl: Any, sets: list[str], code: int, table: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtpctl.telemetry.trackers.find_spec", lambda name: None)
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "1", "answer": "1"}\n{"prompt": "1"}\n')
    sets = ["cluster.num_cpus=8", *(text.replace("FOLDER", str(tmp_path)) for text in sets)]
    message = mtpctl("train", "tiny_mtp", "--dry-run", *(part for text in sets for part in ("--set", text)))
    assert (message.code, "memory     estimates" in message.out) == (code, table)
    assert message.err.startswith("error: ") and message.err.count("\n") == 1


def test_dry_run_reports_every_error_on_a_line(mtpctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpctl.telemetry.trackers.find_spec", lambda name: None)
    wrong = ["rollout.engine_args={max_num_seq: 1}", "telemetry.wandb=project", "cluster.num_cpus=8"]
    arguments = ["train", "tiny_mtp", "--dry-run", *(part for text in wrong for part in ("--set", text))]
    message = mtpctl(*arguments)
    assert message.code == 2 and message.err.splitlines() == [
        "error: rollout.engine_args.max_num_seq: vLLM has no such option; did you mean max_num_seqs?",
        "also: telemetry.wandb: the package wandb is not installed; install it, or remove the key",
    ]
    assert [line.split(": ", 1)[1] for line in message.err.splitlines()] == json.loads(mtpctl(*arguments, "--json").out)["errors"]


def test_misfit_is_reported_with_remedies(mtpctl: Any) -> None:
    arguments = ["train", "mimo7b_mtp", "--dry-run", "--set", "train.parallel={tp: 1}"]
    message = mtpctl(*arguments)
    assert message.code == 4 and message.err.startswith("error: train.parallel: a trainer rank needs 226 GiB, but has 139 GiB of a GPU;")
    assert "GPU        139 GiB (cluster.gpu_gib); the fullest rank needs a GPU of 226.4 GiB\n" in message.out
    assert (
        "87.5 GiB  --set train.offload.optimizer=true  (fits)\n" in message.out and "80.2 GiB  --set train.recompute=full\n" in message.out
    )
    assert mtpctl(*arguments, "--set", "train.offload.optimizer=true").code == 0


def test_unknown_gpu_size_is_reported_and_the_local_one_is_used(mtpctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["train", "mimo7b_mtp", "--dry-run", "--set", "train.parallel={tp: 1}", "--set", "cluster.gpu_gib=null"]
    monkeypatch.setattr("mtpctl.jobs.dry_run.gpu_memory_gib", lambda: None)
    message = mtpctl(*arguments)
    assert (
        message.code == 0
        and "of unknown size, so only rollout.kv_cache_bytes is checked: the fullest rank needs a GPU of 226.4 GiB; set" in message.out
    )
    monkeypatch.setattr("mtpctl.jobs.dry_run.gpu_memory_gib", lambda: 80.0)
    message = mtpctl(*arguments)
    assert message.code == 4 and "GPU        80 GiB (this machine)" in message.out


def test_unreachable_hub_is_exit_code_3(mtpctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(hub_id: str, field: str) -> dict[str, Any]:
        raise PrerequisiteMissing(f"{field}: the config of {hub_id} could not be had")

    monkeypatch.setattr("mtpctl.recipe.model._fetch", unreachable)
    message = mtpctl("train", "mimo7b_mtp", "--dry-run", "--set", "model.path=missing/nothing")
    assert (message.code, message.err) == (3, "error: model.path: the config of missing/nothing could not be had\n")


def test_unservable_family_is_exit_code_3_with_a_fix(mtpctl: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mtpctl.families.reading.find_spec", lambda name: None)
    folder = sparse_folder(tmp_path / "hf", TOYS["qwen3.5"])
    model = "model={config: null, path: " + json.dumps(str(folder)) + ", tokenizer: bytes}"
    message = mtpctl("train", "tiny_mtp", "--dry-run", "--set", model, "--set", "train.precision=bf16")
    assert message.code == 3 and message.err.startswith(
        "error: torchvision: is not installed, and vLLM needs it to serve qwen3.5; reinstall"
    )
    assert message.err.count("\n") == 1
    assert mtpctl("train", "tiny_mtp", "--dry-run", "--set", model, "--set", "train.stages=[sft]").code == 0


def test_version_is_that_of_the_package(mtpctl: Any) -> None:
    from importlib.metadata import version

    first, stack = mtpctl("--version").out.splitlines()
    assert first == f"mtpctl {version('mtpctl')}"
    assert {f"torch {version('torch')}", f"ray {version('ray')}", f"transformers {version('transformers')}"} <= set(stack.split(" · "))


def test_recipe_copy_keeps_comments_and_overwrites_nothing(mtpctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert mtpctl("recipe", "copy", "tiny_mtp").out == "tiny_mtp.yaml\n"
    assert (tmp_path / "tiny_mtp.yaml").read_text() == load_recipe("tiny_mtp", sets=[]).sources[0].read_text()
    assert mtpctl("recipe", "copy", "h200x2", "mine/gpus.yaml").code == 0
    assert mtpctl("recipe", "validate", "mimo7b_mtp", "--overlay", "mine/gpus.yaml").code == 0
    (tmp_path / "tiny_mtp.yaml").write_text("kept")
    message = mtpctl("recipe", "copy", "tiny_mtp", "tiny_mtp.yaml")
    assert (message.code, message.err) == (2, "error: tiny_mtp.yaml: exists; name another FILE\n")
    assert (tmp_path / "tiny_mtp.yaml").read_text() == "kept"
    assert mtpctl("recipe", "copy", "tiny_mpt").err == "error: there is no recipe 'tiny_mpt'; did you mean tiny_mtp?\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_recipes(mtpctl: Any, shell: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "mine.txt").touch()
    monkeypatch.setenv("_MTPCTL_COMPLETE", f"complete_{shell}")

    def completed(line: str, word: str) -> str:
        # Typer's scripts pass the line of zsh and fish in another variable.
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - bool(word)))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        return str(mtpctl().out)

    assert "doctor" in completed("mtpctl doc", "doc")
    assert "tiny_mtp" in completed("mtpctl train ti", "ti")
    result = completed("mtpctl train mi", "mi")
    assert "mimo7b_mtp" in result and "mine.yaml" in result and "mine.txt" not in result
    assert "h200x2" in completed("mtpctl train mine.yaml --overlay h2", "h2")


@pytest.mark.parametrize("where", [0, 2, 4])
def test_verbose_shows_library_logs_anywhere_on_the_line(where: int) -> None:
    code = (
        "import logging, sys; from mtpctl.cli.app import main; import mtpctl.cli.recipe as recipe; loaded = recipe.load; "
        "recipe.load = lambda *given: (logging.getLogger('library').info('hello'), loaded(*given))[1]; main(sys.argv[1:])"
    )
    arguments = ["recipe", "show", "tiny_mtp", "--json"]
    for verbose in ("-v", "--verbose", None):
        line = [*arguments[:where], verbose, *arguments[where:]] if verbose else arguments
        done = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, timeout=60, check=True)
        assert ("library: hello" in done.stderr) == bool(verbose)


def test_json_without_a_dry_run_is_refused(mtpctl: Any) -> None:
    message = mtpctl("train", "tiny_mtp", "--json")
    assert (message.code, message.err.startswith("error: --json")) == (2, True)


@pytest.mark.parametrize("where", [0, 2, 4])
def test_debug_shows_the_traceback_anywhere_on_the_line(mtpctl: Any, where: int) -> None:
    arguments = ["recipe", "validate", "tiny_mtp", "--set", "seed=x"]
    assert "Traceback" not in mtpctl(*arguments).err
    message = mtpctl(*arguments[:where], "--debug", *arguments[where:])
    assert message.code == 2 and "Traceback" in message.err and message.err.endswith("error: --set: seed must be an integer, got 'x'\n")


@pytest.mark.parametrize("arguments", [["nothing"], ["recipe", "shwo"], ["train"], ["train", "tiny_mtp", "--nothing"]])
def test_a_wrong_command_line_is_exit_2_without_a_traceback(mtpctl: Any, arguments: list[str]) -> None:
    message = mtpctl(*arguments)
    assert message.code == 2 and "Traceback" not in message.err and message.err


def test_train_runs_the_recipe_and_returns_its_exit_code(mtpctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType

    handed: list[Any] = []
    room = ModuleType("mtpctl.controller.train")
    room.run = lambda recipe, *, plain: handed.append((recipe, plain)) or 130  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mtpctl.controller.train", room)
    message = mtpctl("train", "tiny_mtp", "--plain", "--set", "seed=4")
    assert message.code == 130
    assert handed == [(load_recipe("tiny_mtp", sets=["seed=4"]).recipe, True)]


def test_a_recipe_that_does_not_fit_starts_nothing(mtpctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setitem(sys.modules, "mtpctl.controller.train", None)
    assert mtpctl("train", "tiny_mtp", "--set", "train.stages=[]").code == 2


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_stop_signal_ends_a_command_with_128_and_its_number(
    mtpctl: Any, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, code: int
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(sent)

    # A shell's background job ignores Ctrl-C, and so would this one.
    before = signal.default_int_handler if sent == signal.SIGINT else signal.SIG_DFL
    monkeypatch.setattr("mtpctl.recipe.loading.load_recipe", interrupted)
    inherited = signal.signal(sent, before)
    try:
        message = mtpctl("recipe", "validate", "tiny_mtp")
        assert (message.code, message.err) == (code, "interrupted\n")
        assert signal.getsignal(sent) == before
    finally:
        signal.signal(sent, inherited)


def test_ignored_sighup_stays_ignored(mtpctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nohup` starts the command so."""
    handlers: list[object] = []

    def load(*_: Any, **__: Any) -> None:
        handlers.append(signal.getsignal(signal.SIGHUP))
        raise UserError("seed: none")

    monkeypatch.setattr("mtpctl.recipe.loading.load_recipe", load)
    inherited = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        mtpctl("recipe", "validate", "tiny_mtp")
    finally:
        signal.signal(signal.SIGHUP, inherited)
    assert handlers == [signal.SIG_IGN]


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "mtp", "tiny_mtp", "--out"),
        ("bench", "async", "tiny_mtp", "--out"),
        ("bench", "rollout", "--shape", "tiny", "--model"),
    ],
)
def test_folder_that_cannot_be_created_is_a_one_line_error(mtpctl: Any, command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        message = mtpctl(*command, str(place))
        assert message.code == 2 and message.err.count("\n") == 1 and message.err.startswith("error: ") and str(place) in message.err
    assert (tmp_path / "file").read_text() == "kept"


def test_user_model_is_not_overwritten_by_a_created_one(mtpctl: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    message = mtpctl("bench", "rollout", "--shape", "tiny", "--model", str(tmp_path))
    assert message.code == 2 and "--shape: applies to the benchmark's own model" in message.err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("config.json", '{"model_type": "qwen2"}')]


def test_dry_run_reports_an_unreachable_cluster(mtpctl: Any, tmp_path: Path) -> None:
    message = mtpctl("train", "tiny_mtp", "--dry-run", "--set", "cluster.address=127.0.0.1:1", "--set", f"run_dir={tmp_path / 'run'}")
    assert message.code == 3 and "trainer-0  host 0" in message.out, "it is planned as if"
    assert message.err.startswith("error: cluster.address: no Ray cluster answers at 127.0.0.1:1")
