"""Read rows from files (.jsonl, .json and Parquet), folders and Hugging Face datasets.

The library `datasets` reads a dataset if it is installed. Otherwise the dataset's own files are downloaded: the .parquet, .jsonl or .json
files that its card, or the file names, assign to the subset and split. Downloaded files are read from the cache, also without a network.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import fnmatch
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import yaml

from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.recipe.data import ROW_FILES

if TYPE_CHECKING:
    import pyarrow


_BOM = b"\xef\xbb\xbf"
"""Byte order mark, with which Windows begins text files."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file or dataset.

    Attributes:
        row_id: the same in every run (`file:line`).
        location: file and line, or the row id, for errors.
        columns: values by column.
    """

    row_id: str
    location: str
    columns: dict[str, object]


def read_file_rows(path: Path, field: str) -> Iterator[Row]:
    """The rows of a file, or of all files below a folder in order of their names. Lines and rows are counted from 1.

    `field` is the recipe key or option of the path. Raises UserError, with file and line, for missing, unsupported and unreadable files,
    and for rows that are not objects.
    """
    for file, name in files_of(path, field):
        if file.suffix == ".parquet":
            rows = _read_parquet(file)
        elif file.suffix == ".json" and _is_json_array(file):
            rows = _read_json_array(file)
        else:
            rows = _read_jsonl(file)
        for number, columns in rows:
            yield Row(f"{name}:{number}", f"{file}:{number}", columns)


def files_of(path: Path, field: str) -> list[tuple[Path, str]]:
    """The file at `path`, or the files below it, each with its name in row ids. Raises UserError if there is none."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in ROW_FILES and file.is_file() and not _is_hidden(file, path))
        if not files:
            raise UserError(f"{field}: the folder {path} has no .jsonl, .json or .parquet file; name another")
        return [(file, str(file.relative_to(path))) for file in files]
    if not path.is_file():
        raise UserError(f"{field}: no file {path}; name a .jsonl, .json or .parquet file, or a folder of them")
    if path.suffix not in ROW_FILES:
        raise UserError(f"{field}: {path} is neither .jsonl, .json nor .parquet; convert it")
    return [(path, path.name)]


def _is_hidden(file: Path, folder: Path) -> bool:
    """Whether a file or one of its folders is hidden, such as the metadata of tools."""
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    with _open(path) as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            location = f"{path}:{number}"
            yield number, _require_object(_parse_json(raw.removeprefix(_BOM) if number == 1 else raw, location), location)


def _read_json_array(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    with _open(path) as file:
        value = _parse_json(file.read().removeprefix(_BOM), str(path))
    assert isinstance(value, list), "its first character is ["
    for number, row in enumerate(value, start=1):
        yield number, _require_object(row, f"{path}:{number}")


def _is_json_array(path: Path) -> bool:
    """Whether a .json file is one list of rows; otherwise it has one object per line."""
    with _open(path) as file:
        return file.read(64).removeprefix(_BOM).lstrip()[:1] == b"["


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _parse_json(raw: bytes, location: str) -> object:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{location}: not UTF-8 text; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise UserError(f"{location}: not JSON ({error.msg} at {position}); fix or remove the line") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location}: not JSON that can be read ({error}); fix or remove the line") from error


def _require_object(row: object, location: str) -> dict[str, object]:
    if not isinstance(row, dict):
        raise UserError(f"{location}: a row must be an object with columns, such as `prompt` and `answer`; fix or remove it")
    return row


def _read_parquet(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            convert = _needs_conversion(file.schema_arrow)
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {name: as_json(value) for name, value in row.items()} if convert else row
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: contains text that is not UTF-8 ({error}); rewrite the file") from error
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]}); rewrite the file") from error


def _needs_conversion(schema: pyarrow.Schema) -> bool:
    """Whether columns have types that JSON lacks, such as times and bytes."""
    types = ("timestamp", "date", "time", "duration", "decimal", "binary", "map")
    return any(type_name in str(column.type) for column in schema for type_name in types)


def as_json(value: object) -> object:
    """Convert a value to JSON types: times to ISO 8601, durations to seconds, bytes to base64, all other types to text."""
    match value:
        case None | str() | bool() | int() | float():
            return value
        case dict():
            return {str(key): as_json(item) for key, item in value.items()}
        case list() | tuple():
            return [as_json(item) for item in value]
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case decimal.Decimal():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode("ascii")
    return str(value)


Layout = dict[str, dict[str, list[str]]]
"""The files of a dataset by subset and split."""

_PARQUET_BRANCH = "refs/convert/parquet"
"""Branch in which the hub keeps a Parquet copy of a dataset whose own files are not Parquet, as `subset/split/0000.parquet`."""
_SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test", "evaluation": "test"} | dict.fromkeys(
    ("validation", "valid", "val", "dev"), "validation"
)
_METADATA_FILES = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}


class _HubUnreachable(Exception):
    """The hub does not respond."""


_LISTINGS = "mtpctl-listings"
"""Folder in the hub's cache of a dataset: the names of all files of a commit, of which the cache may have only some."""
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})(\..*)")


class _NotCached(Exception):
    """The hub does not respond, and the dataset is not in the cache."""


def read_dataset_rows(name: str, subset: str | None, split: str, *, field: str, section: str, fetch: bool = True) -> Iterator[Row]:
    """The rows of one split, with ids `owner/name/subset/split:number`. With `fetch=False`, only the cache is searched.

    `field` is the recipe key of the dataset, `section` the prefix of the keys `subset` and `split`. Raises UserError, with alternatives,
    if there is no such dataset, subset or split; PrerequisiteMissing if neither the hub nor the cache has it.
    """
    if find_spec("datasets") is not None:
        yield from _read_with_datasets(name, subset, split, field, section, fetch)
        return
    try:
        layout, source = _locate_files(name, field, fetch)
    except _NotCached as error:
        raise PrerequisiteMissing(
            f"{field}: {name} could not be downloaded from the hub and is not in the cache; {_download_advice(name)}"
        ) from error
    subset = _select_subset(name, subset, split, layout, field, section)
    number = 0
    for file in layout[subset][split]:
        for row in read_file_rows(_local_path(name, file, source, field), field):
            number += 1
            row_id = f"{name}/{subset}/{split}:{number}"
            yield Row(row_id, row_id, row.columns)


def _read_with_datasets(name: str, subset: str | None, split: str, field: str, section: str, fetch: bool) -> Iterator[Row]:
    import datasets

    try:
        dataset = datasets.load_dataset(
            name, subset, split=split, download_config=None if fetch else datasets.DownloadConfig(local_files_only=True)
        )
    except Exception as error:  # of any library that reads the dataset
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, ValueError):
            raise UserError(f"{section}split: {name} with subset {subset} and split {split} cannot be loaded: {reason}") from error
        raise PrerequisiteMissing(f"{field}: {name} could not be loaded ({type(error).__name__}: {reason}); name a file instead") from error
    subset = dataset.info.config_name or subset or "default"
    for number, columns in enumerate(dataset, start=1):
        row_id = f"{name}/{subset}/{split}:{number}"
        yield Row(row_id, row_id, cast("dict[str, object]", as_json(columns)))


def _download_advice(name: str) -> str:
    return f"download it on a machine with a network (hf download --repo-type dataset {name}), or name a file"


def _find_missing_shards(files: Sequence[str]) -> list[str]:
    """Shards, such as `train-00001-of-00004.parquet`, that are not among these files although others of their set are."""
    matches = [match for file in files if (match := _SHARD.fullmatch(file))]
    needed = {f"{match[1]}-{number:05d}-of-{match[2]}{match[3]}" for match in matches for number in range(int(match[2]))}
    return sorted(needed.difference(files))


def _locate_files(name: str, field: str, fetch: bool) -> tuple[Layout, Path | str]:
    """The layout of a dataset, and the source of its files: a folder of the cache, or a revision on the hub. Raises _NotCached."""
    if not fetch:
        return _cached_layout(name)
    try:
        files, revision = _list_hub_files(name, "main", field)
        card = _local_path(name, "README.md", revision, field).read_text(encoding="utf-8", errors="replace") if "README.md" in files else ""
        layout = layout_of(files, card)
        if not layout:
            files, revision = _list_hub_files(name, _PARQUET_BRANCH, field)
            layout = converted_layout(files)
        return layout, revision
    except _HubUnreachable:
        return _cached_layout(name)


def _record_listing(name: str, revision: str, commit: str, files: list[str]) -> None:
    """Record in the hub's cache which commit a revision is, and all its files, for later runs without a network.

    Files are downloaded one by one by their commit, which records neither.
    """
    folder = _cache_folder(name)
    for file, text in ((folder / "refs" / revision, commit), (folder / _LISTINGS / f"{commit}.json", json.dumps(files))):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(file)


def _cache_folder(name: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="dataset"))


def _list_hub_files(name: str, revision: str, field: str) -> tuple[list[str], str]:
    """The files of a dataset on the hub, and their commit. Raises _HubUnreachable if the hub does not respond."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = HfApi().dataset_info(name, revision=None if revision == "main" else revision)
    except GatedRepoError as error:
        raise UserError(f"{field}: {name} is gated; accept its terms on the hub, and log in with `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"{field}: {name} is neither a local file or folder nor a dataset of the hub; check the spelling") from error
    except RevisionNotFoundError:
        return [], revision
    except Exception as error:  # huggingface_hub changes its HTTP library between releases
        raise _HubUnreachable from error
    files = [sibling.rfilename for sibling in info.siblings or []]
    if info.sha is not None and files:
        _record_listing(name, revision, info.sha, files)
    return files, info.sha or revision


def _cached_layout(name: str) -> tuple[Layout, Path]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    for revision in ("main", _PARQUET_BRANCH):
        try:
            folder = Path(snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            continue
        listing = _cache_folder(name) / _LISTINGS / f"{folder.name}.json"
        stored_files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        files = json.loads(listing.read_text()) if listing.is_file() else stored_files
        if missing := _find_missing_shards(files):
            raise _NotCached(missing[0])
        card = (folder / "README.md").read_text(encoding="utf-8", errors="replace") if "README.md" in stored_files else ""
        if layout := layout_of(files, card) if revision == "main" else converted_layout(files):
            return layout, folder
    raise _NotCached


def _local_path(name: str, file: str, source: Path | str, field: str) -> Path:
    """The file on this machine, downloaded if `source` is a revision."""
    if isinstance(source, Path):
        if not (source / file).is_file():
            raise PrerequisiteMissing(f"{field}: {file} of {name} is not in the cache; {_download_advice(name)}")
        return source / file
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(hf_hub_download(name, file, repo_type="dataset", revision=source))
    except (HfHubHTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PrerequisiteMissing(f"{field}: {file} of {name} could not be downloaded ({reason}); try again, or name a file") from error


def _select_subset(name: str, subset: str | None, split: str, layout: Layout, field: str, section: str) -> str:
    """The subset to read. Raises UserError if it or its split does not exist."""
    if not layout:
        raise UserError(
            f"{field}: {name} has no .parquet, .jsonl or .json files; install the library `datasets`, which reads others, or convert it"
        )
    if subset is None:
        subset = next(iter(layout)) if len(layout) == 1 else "default"
        if subset not in layout:
            raise UserError(f"{section}subset: {name} has the subsets {', '.join(layout)}; set {section}subset: {next(iter(layout))}")
    if subset not in layout:
        raise UserError(f"{section}subset: {name} has no subset {subset!r}; its subsets are {', '.join(layout)}")
    if split not in layout[subset]:
        raise UserError(f"{section}split: {name} has no split {split!r}; its splits are {', '.join(layout[subset])}")
    return subset


def layout_of(files: list[str], card: str) -> Layout:
    """Subsets, splits and their files, from the card's `configs` or from the names of files and folders."""
    files = sorted(file for file in files if Path(file).suffix in ROW_FILES and Path(file).name not in _METADATA_FILES)
    layout: Layout = {}
    for config in _card_configs(card):
        splits: dict[str, list[str]] = {}
        for split, pattern in _file_patterns(config):
            matches = [file for file in files if fnmatch.fnmatchcase(file, pattern)]
            for file in matches:
                splits.setdefault(split or _split_of(file), []).append(file)
        if splits:
            layout[str(config.get("config_name", "default"))] = splits
    if layout:
        return layout
    for file in files:
        folders = Path(file).parts[:-1]
        subset = folders[0] if folders and folders[0] != "data" and folders[0].lower() not in _SPLITS else "default"
        layout.setdefault(subset, {}).setdefault(_split_of(file), []).append(file)
    return layout


def converted_layout(files: list[str]) -> Layout:
    """The layout of the hub's Parquet copy."""
    layout: Layout = {}
    for file in sorted(files):
        path_parts = Path(file).parts
        if len(path_parts) == 3 and file.endswith(".parquet"):
            layout.setdefault(path_parts[0], {}).setdefault(path_parts[1].removeprefix("partial-"), []).append(file)
    return layout


def _card_configs(card: str) -> list[Mapping[str, object]]:
    """The `configs` of a dataset's card; empty if there are none."""
    front_matter = re.match(r"---\s*\n(.*?)\n---", card, re.DOTALL)
    try:
        metadata = yaml.safe_load(front_matter[1]) if front_matter else None
    except yaml.YAMLError:  # cards are written by hand; the file names are used instead
        return []
    configs = metadata.get("configs") if isinstance(metadata, dict) else None
    return [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []


def _file_patterns(config: Mapping[str, object]) -> Iterator[tuple[str | None, str]]:
    """The split and the glob pattern of the files of one config. If the split is None, the file name determines it."""
    folder = str(config.get("data_dir", "")).strip("/")
    prefix = f"{folder}/" if folder else ""
    entries = config.get("data_files", "*")
    for entry in entries if isinstance(entries, list) else [entries]:
        paths = entry.get("path") if isinstance(entry, dict) else entry
        split = str(entry["split"]) if isinstance(entry, dict) and "split" in entry else None
        for path in paths if isinstance(paths, list) else [paths]:
            yield split, prefix + str(path)


def _split_of(file: str) -> str:
    """The split that occurs in the name of a file or its folders; `train` if none does."""
    parts = Path(file).with_suffix("").parts
    for part in reversed(parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return "train"
