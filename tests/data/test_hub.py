"""Datasets of the hub, with a cache on disk and a fake hub: no test uses the network."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pyarrow
import pyarrow.parquet
import pytest

from mtpctl.data.inspection import inspect_sets
from mtpctl.data.rows import Layout, converted_layout, layout_of
from mtpctl.data.sets import RowReader, RowSource
from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.recipe.data import ColumnsConfig, DataConfig, EvaluationConfig, is_dataset_id

CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# GSM8K
"""
FILES = {
    "README.md": CARD,
    "main/train-00000-of-00002.parquet": ["1+1?", "1+2?"],
    "main/train-00001-of-00002.parquet": ["1+3?"],
    "main/test-00000-of-00001.parquet": ["9+9?"],
    "socratic/train-00000-of-00001.parquet": ["why?"],
}


def fill(folder: Path, files: Mapping[str, Any] = FILES) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            (folder / name).write_text(content)
        else:
            table = pyarrow.table({"question": content, "answer": ["#### 2"] * len(content)})
            pyarrow.parquet.write_table(table, folder / name)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, empty, on a machine that is offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("mtpctl.data.rows.find_spec", lambda name: None)
    return tmp_path / "hub"


def cached(cache: Path, revision: str = "main", files: Mapping[str, Any] = FILES) -> None:
    """What an earlier download has left, in the layout of the hub's cache."""
    repository = cache / "datasets--openai--gsm8k"
    (repository / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / revision).write_text("a" * 40)
    fill(repository / "snapshots" / ("a" * 40), files)


def read(subset: str | None = "main", split: str = "train", *, fetch: bool = True) -> Iterator[Any]:
    rows = RowSource("openai/gsm8k", RowReader(ColumnsConfig(prompt="question")), "data.path", subset, split)
    return rows.problems(fetch=fetch)


def test_offline_the_cache_is_read_and_ids_count_over_all_files_of_a_split(cache: Path) -> None:
    cached(cache)
    assert [(problem.prompt_id, problem.prompt) for problem in read()] == [
        ("openai/gsm8k/main/train:1", "1+1?"),
        ("openai/gsm8k/main/train:2", "1+2?"),
        ("openai/gsm8k/main/train:3", "1+3?"),
    ]
    assert [problem.prompt for problem in read(split="test")] == ["9+9?"]


def test_the_hubs_own_copy_in_parquet_serves_a_dataset_of_another_kind(cache: Path) -> None:
    cached(cache, "refs/convert/parquet", {"main/train/0000.parquet": ["1+1?"]})
    assert [problem.prompt_id for problem in read(None)] == ["openai/gsm8k/main/train:1"]


@pytest.mark.parametrize(
    ("subset", "split", "message"),
    [
        (None, "train", "data.subset: openai/gsm8k has the subsets main, socratic; set data.subset: main"),
        ("mian", "train", "data.subset: openai/gsm8k has no subset 'mian'; its subsets are main, socratic"),
        ("main", "valid", "data.split: openai/gsm8k has no split 'valid'; its splits are train, test"),
    ],
)
def test_missing_subset_or_split_is_reported_with_existing_ones(cache: Path, subset: str | None, split: str, message: str) -> None:
    cached(cache)
    with pytest.raises(UserError) as caught:
        list(read(subset, split))
    assert str(caught.value) == message


def test_missing_network_and_cache_give_one_line_with_the_download_command(cache: Path) -> None:
    with pytest.raises(PrerequisiteMissing) as caught:
        list(read())
    assert str(caught.value) == (
        "data.path: openai/gsm8k could not be downloaded from the hub and is not in the cache; download it on a machine with a network "
        "(hf download --repo-type dataset openai/gsm8k), or name a file"
    )


def test_unreachable_hub_gives_the_same_line_for_errors_of_any_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ConnectError(Exception):
        """An error of a library for HTTP that nothing here knows."""

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    with pytest.raises(
        PrerequisiteMissing, match=r"^data\.path: openai/gsm8k could not be downloaded from the hub and is not in the cache; "
    ):
        list(read())
    cached(cache)
    assert len(list(read())) == 3


def test_a_look_at_the_data_asks_no_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", asked)
    config = DataConfig(path="openai/gsm8k", subset="main", columns=ColumnsConfig(prompt="question"))
    (result,) = inspect_sets(config, EvaluationConfig(), ["rl"])
    assert str(result) == "train: openai/gsm8k is not in the cache yet; the run downloads it from the hub"
    cached(cache)
    (result,) = inspect_sets(config, EvaluationConfig(), ["rl"])
    assert str(result) == "train: openai/gsm8k (train), 3 rows"


class Hub:
    """A hub that has `FILES` of openai/gsm8k."""

    def __init__(self, folder: Path, files: Mapping[str, Any] = FILES) -> None:
        fill(folder, files)
        self.folder, self.files, self.fetched = folder, files, list[str]()

    def dataset_info(self, _: object, name: str, revision: str | None = None) -> SimpleNamespace:
        files = [] if revision else self.files
        return SimpleNamespace(sha="b" * 40, siblings=[SimpleNamespace(rfilename=name) for name in files])

    def download(self, name: str, file: str, *, repo_type: str, revision: str) -> str:
        assert (name, repo_type, revision) == ("openai/gsm8k", "dataset", "b" * 40)
        self.fetched.append(file)
        return str(self.folder / file)


def connect(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda api, name, **options: hub.dataset_info(api, name, **options))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub.download)


def test_only_the_card_and_files_of_the_split_are_downloaded(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path / "remote")
    connect(hub, monkeypatch)
    assert [problem.prompt for problem in read(split="test")] == ["9+9?"]
    assert hub.fetched == ["README.md", "main/test-00000-of-00001.parquet"]


def test_a_dataset_without_readable_files_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(Hub(tmp_path / "remote", {"data.csv": "a,b"}), monkeypatch)
    with pytest.raises(
        UserError, match=r"data\.path: openai/gsm8k has no \.parquet, \.jsonl or \.json files; install the library `datasets`"
    ):
        list(read())


@pytest.mark.parametrize(
    ("kind", "message"), [("RepositoryNotFoundError", "is neither a local file or folder nor"), ("GatedRepoError", "is gated")]
)
def test_dataset_rejected_by_hub_is_user_error(cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str) -> None:
    import huggingface_hub.errors

    def refuse(*_: object, **__: object) -> None:
        raise getattr(huggingface_hub.errors, kind)("no", response=httpx.Response(404, request=httpx.Request("GET", "https://hub")))

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refuse)
    with pytest.raises(UserError, match=rf"^data\.path: openai/gsm8k {message}"):
        list(read())


def test_datasets_library_is_preferred_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    class LoadedRecipe(list[dict[str, str]]):
        info = SimpleNamespace(config_name="main")

    def load_dataset(name: str, subset: str | None, *, split: str, download_config: object) -> LoadedRecipe:
        if split != "train":
            raise ValueError(f"Unknown split \"{split}\". Should be one of ['train'].")
        return LoadedRecipe([{"question": "1+1?", "answer": "2"}])

    library = ModuleType("datasets")
    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setattr("mtpctl.data.rows.find_spec", lambda name: object())
    assert [problem.prompt_id for problem in read(None)] == ["openai/gsm8k/main/train:1"]
    with pytest.raises(UserError, match=r"^data\.split: openai/gsm8k with subset None and split dev cannot be loaded: Unknown split"):
        list(read(None, "dev"))


@pytest.mark.parametrize(
    ("files", "layout"),
    [
        (
            ["data/train-00000.parquet", "data/test.parquet"],
            {"default": {"test": ["data/test.parquet"], "train": ["data/train-00000.parquet"]}},
        ),
        (["train.jsonl", "dev.jsonl", "dataset_infos.json"], {"default": {"validation": ["dev.jsonl"], "train": ["train.jsonl"]}}),
        (["en/test/0.parquet", "fr/test/0.parquet"], {"en": {"test": ["en/test/0.parquet"]}, "fr": {"test": ["fr/test/0.parquet"]}}),
        (["rows.json", "image.png"], {"default": {"train": ["rows.json"]}}),
        (["contest.parquet"], {"default": {"train": ["contest.parquet"]}}),
    ],
)
def test_subset_and_split_follow_from_file_names_without_card(files: list[str], layout: Layout) -> None:
    assert layout_of(files, "") == layout


def test_dataset_card_with_invalid_metadata_is_ignored() -> None:
    assert layout_of(["train.jsonl"], "---\nconfigs: [\n---\n") == {"default": {"train": ["train.jsonl"]}}
    assert converted_layout(["main/train/0000.parquet", "main/partial-test/0000.parquet", "x"]) == {
        "main": {"train": ["main/train/0000.parquet"], "test": ["main/partial-test/0000.parquet"]}
    }


def test_dataset_ids_are_distinguished_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_dataset_id("openai/gsm8k")
    assert not any(map(is_dataset_id, ["rows.jsonl", "data/rows.jsonl", "a/b/c", "./gsm8k", str(tmp_path)]))
    (tmp_path / "openai").mkdir()
    assert not is_dataset_id("openai/gsm8k"), "a folder here that lacks the file is not the hub's"


def test_dataset_that_was_read_online_is_read_again_offline(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are downloaded by their commit, for which the hub's library records no revision."""
    hub = Hub(tmp_path / "remote")
    snapshot = cache / "datasets--openai--gsm8k" / "snapshots" / ("b" * 40)

    def download(name: str, file: str, *, repo_type: str, revision: str) -> str:
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(hub.folder / file, snapshot / file)
        return str(snapshot / file)

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda api, name, **options: hub.dataset_info(api, name, **options))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert [problem.prompt for problem in read(split="test")] == ["9+9?"]
    assert [problem.prompt for problem in read(split="test", fetch=False)] == ["9+9?"]
    message = "data.path: main/train-00000-of-00002.parquet of openai/gsm8k is not in the cache; download it"
    with pytest.raises(PrerequisiteMissing, match=message):
        list(read(fetch=False))


def test_partly_downloaded_split_is_not_read_as_if_it_were_complete(cache: Path) -> None:
    cached(cache, files={name: content for name, content in FILES.items() if "train-00001" not in name})
    with pytest.raises(PrerequisiteMissing, match=r"data\.path: openai/gsm8k could not be downloaded from the hub and is not in the cache"):
        list(read())


def test_dataset_without_the_parquet_branch_is_not_an_unreachable_hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import RevisionNotFoundError

    hub = Hub(tmp_path / "remote", {"data.csv": "a,b"})

    def info(api: object, name: str, revision: str | None = None) -> SimpleNamespace:
        if revision:
            raise RevisionNotFoundError("no", response=httpx.Response(404, request=httpx.Request("GET", "https://hub")))
        return hub.dataset_info(api, name)

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    with pytest.raises(UserError, match=r"has no \.parquet, \.jsonl or \.json files"):
        list(read())
