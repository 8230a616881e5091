"""Files, overlays and sets are merged to one recipe; every value has an origin, and every mistake gives one line with a fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mtpctl.errors import UserError
from mtpctl.recipe import yaml12
from mtpctl.recipe.fields import ALIASES, find_key
from mtpctl.recipe.loading import RECIPES, dump_resolved, flatten, list_recipes, load_recipe
from mtpctl.recipe.rollout import ReplicaRange
from mtpctl.recipe.schema import Recipe, TelemetryConfig

BASE = """\
seed: 3
train:
  stages: [sft]
  rl:
    optimizer: {lr: 1e-5}
rollout:
  eager: no
  max_tokens: 64
mtp:
  mode: off
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base.yaml", BASE)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_values_are_converted_to_field_types(base: Path) -> None:
    recipe = load_recipe(base).recipe
    assert recipe.mtp.mode == "off" and recipe.rollout.engine == "vllm"
    assert recipe.rollout.eager is False  # type: ignore[union-attr]
    assert recipe.train.rl.optimizer.lr == 1e-5


def test_defaults_of_a_stage_stay_its_own_when_a_neighbour_is_set(base: Path) -> None:
    recipe = load_recipe(base, sets=["train.sft.optimizer.clip_grad=0.5"]).recipe
    assert recipe.train.sft.optimizer.lr == Recipe().train.sft.optimizer.lr != Recipe().train.rl.optimizer.lr


def test_overlays_merge_in_order_and_lists_are_replaced(base: Path, tmp_path: Path) -> None:
    first = write(tmp_path / "first.yaml", "train:\n  stages: [rl]\n  rl: {steps: 5}\nseed: 4\n")
    second = write(tmp_path / "second.yaml", "seed: 5\n")
    loaded = load_recipe(base, overlays=[first, second])
    assert loaded.recipe.train.stages == ["rl"]
    assert (loaded.recipe.seed, loaded.recipe.train.rl.steps, loaded.recipe.train.rl.optimizer.lr) == (5, 5, 1e-5)
    assert loaded.origins["seed"] == f"{second}:1"
    assert loaded.origins["train.rl.steps"] == f"{first}:3"
    assert loaded.sources == (base, first, second)


def test_an_overlay_may_choose_another_variant(base: Path, tmp_path: Path) -> None:
    overlay = write(tmp_path / "o.yaml", "sync:\n  transport: shm\n  bucket_bytes: 4096\n")
    assert load_recipe(base, overlays=[overlay]).recipe.sync.transport == "shm"


def test_a_variant_section_without_its_key_is_the_default_one(base: Path) -> None:
    assert load_recipe(base, sets=["sync.bucket_bytes=4096"]).recipe.sync.transport == "nccl"


def test_replicas_are_a_number_or_a_range(base: Path) -> None:
    loaded = load_recipe(base, sets=["rollout.replicas=2", "rollout.replicas.max=3"])
    assert loaded.recipe.rollout.replica_range == ReplicaRange(min=1, max=3) and loaded.recipe.rollout.elastic
    assert (loaded.origins["rollout.replicas.min"], loaded.origins["rollout.replicas.max"]) == ("default", "--set")
    number = load_recipe(base, sets=["rollout.replicas={max: 3}", "rollout.replicas=2"]).recipe.rollout
    assert number.replica_range == ReplicaRange(min=2, max=2) and not number.elastic


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout.replicas=0", "--set: rollout.replicas must be greater than 0, got 0"),
        ("rollout.replicas=many", "--set: rollout.replicas must be an integer, got 'many'"),
        ("rollout.replicas={min: 0}", "--set: rollout.replicas.min must be greater than 0, got 0"),
        ("rollout.replicas={min: 1, most: 2}", "rollout.replicas.most is not a key; keys of rollout.replicas: min, max"),
        ("telemetry.http=localhost", "--set: telemetry.http must be HOST:PORT, such as 127.0.0.1:9090, got 'localhost'"),
        ("telemetry.http=:70000", "--set: telemetry.http must be HOST:PORT, such as 127.0.0.1:9090, got ':70000'"),
    ],
)
def test_invalid_replicas_and_addresses_are_rejected(base: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(base, sets=[text])
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9090", ("127.0.0.1", 9090)),
        ("':9090'", ("127.0.0.1", 9090)),
        ("'0.0.0.0:0'", ("0.0.0.0", 0)),
        ("'[::1]:9090'", ("::1", 9090)),
        ("head.example:80", ("head.example", 80)),
        ("null", None),
    ],
)
def test_status_page_binds_to_loopback_by_default(base: Path, text: str, address: tuple[str, int] | None) -> None:
    telemetry = load_recipe(base, sets=[f"telemetry.http={text}"]).recipe.telemetry
    assert telemetry.http_address == address
    assert TelemetryConfig.model_validate(telemetry.model_dump()) == telemetry


def test_every_value_has_an_origin(base: Path) -> None:
    loaded = load_recipe(base, sets=["train.lora.rank=8", "rollout.engine_args={a: 1}", "train.sft={steps: 2}"])
    everything = flatten(loaded.recipe.model_dump(mode="json", by_alias=True))
    assert set(loaded.origins) == {".".join(path) for path in everything}
    inputs = {key: origin for key, origin in loaded.origins.items() if origin != "default"}
    assert inputs == {
        "seed": f"{base}:1",
        "train.stages": f"{base}:3",
        "train.rl.optimizer.lr": f"{base}:5",
        "rollout.eager": f"{base}:7",
        "rollout.max_tokens": f"{base}:8",
        "mtp.mode": f"{base}:10",
        "train.lora.rank": "--set",
        "rollout.engine_args.a": "--set",
        "train.sft.steps": "--set",
    }


def test_sets_take_yaml_values_and_append(base: Path) -> None:
    sets = [
        "train.stages+=rl",
        "rollout.stop+=no",
        "rollout.stop+=[a, b]",
        "model.config.hidden_size=8",
        "async.sync_every=2",
        "model.path=",
    ]
    recipe = load_recipe(base, sets=sets).recipe
    assert recipe.train.stages == ["sft", "rl"]
    assert recipe.rollout.stop == ["no", "a", "b"]
    assert recipe.model.config == {"hidden_size": 8}
    assert recipe.async_.sync_every == 2
    assert recipe.model.path is None


def test_appending_starts_from_the_default(base: Path) -> None:
    assert load_recipe(base, sets=["sync.sections=[target]", "sync.sections+=draft"]).recipe.sync.sections == ["target", "draft"]
    assert load_recipe(base, sets=["train.lora.targets+=in_proj"]).recipe.train.lora.targets[-2:] == ["linear_fc2", "in_proj"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trian.rl.steps=3", "trian.rl.steps is not a key; did you mean train.rl.steps?"),
        ("train.rl.stepz=3", "did you mean train.rl.steps?"),
        ("train.lr=1", "did you mean train.rl.optimizer.lr?"),
        ("train.rl={steps: 3, grup: 3}", "train.rl.grup is not a key"),
        ("train.parallel={dp:2,ep:2}", "train.parallel.dp:2 is not a key; YAML needs a space after the colon: dp: 2"),
        ("async_.sync_every=3", "did you mean async.sync_every?"),
        ("seed", "write KEY=VALUE"),
        ("=3", "write KEY=VALUE"),
        ("a..b=3", "write KEY=VALUE"),
        ("seed=[", "not valid YAML"),
        ("seed+=1", "seed is not a list; write seed=VALUE"),
        ("rollout.engine=vlm", "rollout.engine must be one of 'vllm', 'sglang', got 'vlm'; did you mean vllm?"),
        ("rollout.draft_top_k=1", "rollout.draft_top_k is not a key of rollout with engine: vllm"),
        ("mtp.mode=isolate", "mtp.mode must be 'off', 'load', 'joint' or 'isolated', got 'isolate'; did you mean isolated?"),
        ("train.stages=[sft, rll]", "train.stages.1 must be 'draft', 'sft' or 'rl', got 'rll'; did you mean rl?"),
        ("seed=true", "seed must be a number, got true"),
        ("seed=1.5", "seed must be an integer, got 1.5"),
        ("seed=-1", "seed must be at least 0, got -1"),
        ("train.rl.steps=many", "train.rl.steps must be an integer, got 'many'"),
        ("train.sft.optimizer.lr=0", "train.sft.optimizer.lr must be greater than 0, got 0"),
        ("train.sft.optimizer.lr=.inf", "must be a finite number"),
        ("rollout.top_p=1.5", "rollout.top_p must be at most 1, got 1.5"),
        ("rollout.eager=3", "rollout.eager must be true or false, got 3"),
        ("train.rl.train_mtp=auto", "train.rl.train_mtp must be true or false, got 'auto'"),
        ("train.rl.train_mtp=42", "train.rl.train_mtp must be true or false, got 42"),
        ("rollout.stop=a", "rollout.stop must be a list, got 'a'; write [a]"),
        ("rollout=null", "rollout must be a mapping of keys to values, got null"),
        ("train.rl=3", "train.rl must be a mapping of keys to values, got 3"),
        ("model.config=3", "model.config must be a mapping of keys to values, got 3"),
        ("name=1.10", "name must be text, got 1.1: put it in quotes"),
        ("name=a b", "name may contain only letters, digits, dots, dashes and underscores, got 'a b'"),
        ("train.rl.optimizer.betas=[]", "train.rl.optimizer.betas must be a list of 2 × number, got []"),
        ("train.rl.optimizer.betas=[0.9]", "train.rl.optimizer.betas must be a list of 2 × number, got [0.9]"),
        ("train.rl.optimizer.betas=[0, 0, 0]", "train.rl.optimizer.betas must be a list of 2 × number, got [0, 0, 0]"),
    ],
)
def test_invalid_set_is_one_line_with_fix(base: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(base, sets=[text])
    messages = str(caught.value)
    assert message in messages and messages.startswith("--set") and "\n" not in messages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nsed: 2\n", ":2: sed is not a key; did you mean seed?"),
        ("train:\n  rl:\n    stepz: 2\n", ":3: train.rl.stepz is not a key; did you mean train.rl.steps?"),
        ("lr: 2\n", ":1: lr is not a key; did you mean train."),
        (
            "rollout:\n  speculation: {k: 2}\n",
            ":2: rollout.speculation.k is not a key; keys of rollout.speculation: method, num_tokens, draft_",
        ),
        ("async_:\n  sync_every: 2\n", ":1: async_ is not a key; did you mean async?"),
        ("train:\n  rl:\n", ":2: train.rl must be a mapping of keys to values, got null"),
        ("train:\n  rl:\n    steps: a\n", ":3: train.rl.steps must be an integer, got 'a'"),
        ("rollout:\n  engine: sglang\n  eager: true\n", ":3: rollout.eager is not a key of rollout with engine: sglang"),
        ("- 1\n", ":1: a recipe is a mapping"),
        ("seed: 1\nseed: 2\n", ":2: seed is a duplicate key, first set in line 1"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "r.yaml", text)
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    assert f"{path}{message}" in str(caught.value) and "\n" not in str(caught.value)


def test_further_mistakes_are_reported_with_location_and_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", "train:\n  rl:\n    steps: a\nseed: b\n")
    with pytest.raises(UserError, match=r"(?m)^.*:4: seed must be an integer, got 'b'$") as caught:
        load_recipe(path)
    assert caught.value.__notes__ == [f"{path}:3: train.rl.steps must be an integer, got 'a'"]


def test_key_with_several_types_is_reported_once() -> None:
    with pytest.raises(UserError) as caught:
        load_recipe("tiny_mtp", sets=["cluster.gpu_gib=[a]", "rollout.context={}"])
    assert [text.count("must be") for text in (str(caught.value), *caught.value.__notes__)] == [1, 1]


@pytest.mark.parametrize(
    ("inputs", "meant"),
    [
        ("learning_rate", "train.rl.optimizer.lr"),
        ("train.rl.learning_rate", "train.rl.optimizer.lr"),
        ("train.sft.lr", "train.sft.optimizer.lr"),
        ("train.rl.n_samples", "train.rl.group_size"),
        ("train.rl.kl_beta", "train.rl.kl_coef"),
        ("train.batch_size", "train.rl.prompts_per_step"),
        ("train.sft.train_batch_size", "train.sft.batch_size"),
        ("rollout.gpu_memory_utilization", "rollout.gpu_memory"),
        ("train.rl.optimizer.beta", "train.rl.optimizer.betas"),
        ("rollout.tensor_parallel_size", "rollout.tp"),
    ],
)
def test_the_names_of_other_frameworks_are_understood(tmp_path: Path, inputs: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"{inputs} is not a key; did you mean {meant}\?$"):
        load_recipe("tiny_mtp", sets=[f"{inputs}=1"])
    *above, name = inputs.split(".")
    text = "".join(f"{'  ' * depth}{each}:\n" for depth, each in enumerate(above)) + f"{'  ' * len(above)}{name}: 1\n"
    with pytest.raises(UserError, match=rf"{inputs} is not a key; did you mean {meant}\?$"):
        load_recipe(write(tmp_path / "r.yaml", text))


def test_aliases_point_to_existing_keys_and_do_not_shadow_siblings() -> None:
    for alias, keys in ALIASES.items():
        for key in keys:
            result = find_key(tuple(key.split(".")))
            assert result is not None and result.dotted == key, (alias, key)
            assert not key.endswith(f".{alias}") or alias in ("lr", "batch_size")


def test_a_missing_recipe_names_near_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no recipe 'tiny_mpt'; did you mean tiny_mtp"):
        load_recipe("tiny_mpt")
    with pytest.raises(UserError, match="is a folder, not a recipe file"):
        load_recipe(tmp_path)
    with pytest.raises(UserError, match="there is no overlay 'nowhere'"):
        load_recipe("tiny_mtp", overlays=["nowhere"])


def test_file_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(UserError, match="not UTF-8"):
        load_recipe(path)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path / "r.yaml", "# nothing\n")).recipe == Recipe()


@pytest.mark.parametrize("path", list_recipes(), ids=lambda path: path.stem)
def test_a_resolved_recipe_loads_back_equal_with_nothing_left_to_default(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path).recipe
    again = load_recipe(write(tmp_path / "resolved.yaml", dump_resolved(recipe)))
    assert again.recipe == recipe
    assert "default" not in again.origins.values()


def test_included_recipes_are_loaded_by_name() -> None:
    assert load_recipe("tiny_mtp").sources == (RECIPES / "tiny_mtp.yaml",)


def test_the_run_directory_fills_in_name_and_seed() -> None:
    assert Recipe(name="a", seed=7, run_dir="out/{name}-{seed}").run_path == Path("out/a-7")


@pytest.mark.parametrize(("device", "transport", "meant"), [("auto", "shm", "cpu"), ("auto", "nccl", "cuda"), ("cuda", "shm", "cuda")])
def test_transport_determines_default_device(device: str, transport: str, meant: str) -> None:
    assert Recipe.model_validate({"cluster": {"device": device}, "sync": {"transport": transport}}).device == meant


def test_a_deterministic_run_has_no_staleness_whatever_the_threshold() -> None:
    assert Recipe.model_validate({"async": {"staleness_threshold": 0.5, "deterministic": True}}).async_.staleness == 0
    assert Recipe.model_validate({"async": {"staleness_threshold": 0.5}}).async_.staleness == 0.5


def test_dumping_a_recipe_is_plain_yaml() -> None:
    assert yaml12.parse(dump_resolved(Recipe()), "dumped").value == Recipe().model_dump(mode="json", by_alias=True)


def test_a_tilde_is_the_home_of_whoever_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    recipe = load_recipe("tiny_mtp", sets=["model.path=~/model", "model.tokenizer=~/tok", "data.path=~/a.jsonl", "data.sft_path=a~"]).recipe
    assert (recipe.model.path, recipe.model.tokenizer) == ("/home/ada/model", "/home/ada/tok")
    assert (recipe.data.path, recipe.data.sft_path) == ("/home/ada/a.jsonl", "a~")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed=9223372036854775808", "seed must be below 9223372036854775808, got 9223372036854775808"),
        ('rollout.stop=["END", ""]', "rollout.stop.1 must not be empty"),
    ],
)
def test_values_that_generators_and_engines_refuse_later(text: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_recipe("tiny_mtp", sets=[text])


def test_a_loss_that_is_neither_ours_nor_a_reference_names_the_nearest(base: Path) -> None:
    with pytest.raises(UserError, match=r"train\.rl\.loss must be ppo, gspo, .*, or FILE\.py:NAME .*; did you mean cispo\?"):
        load_recipe(base, sets=["train.rl.loss=cipso"])
