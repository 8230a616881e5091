"""The file of samples: format of a line, continuation of a file, and rejected files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpctl.errors import UserError
from mtpctl.rollout.sample_file import Origin, SampleFile
from mtpctl.samples import Sample, Speculation, VersionSpan

ORIGIN = Origin("tiny", {"temperature": 1.0, "checkpoint": None})
PROMPTS = {"p:1": "1+1=", "p:2": "2+2="}


def sample(prompt_id: str = "p:1", index: int = 0, reward: float | None = 1.0) -> Sample:
    created = Sample(prompt_id, prompt_id, [1, 2], index=index)
    created.append([5, 6], [-0.5, -1.5], 3)
    created.append([7], [-0.25], 4)
    created.finish_reason, created.reward, created.speculation = "stop", reward, Speculation(2, 1, [1], 2)
    return created


def write(path: Path, *samples: Sample) -> None:
    with SampleFile.open(path, ORIGIN, PROMPTS) as file:
        for each in samples:
            file.append(each, PROMPTS[each.prompt_id], "two")


def test_line_contains_the_complete_sample(tmp_path: Path) -> None:
    write(tmp_path / "o", sample(index=2))
    row = json.loads((tmp_path / "o").read_text())
    assert (row["prompt_id"], row["index"], row["prompt"], row["text"]) == ("p:1", 2, "1+1=", "two")
    assert row["tokens"] == [5, 6, 7] and row["behaviour_logprobs"] == [-0.5, -1.5, -0.25]
    assert [VersionSpan(**span) for span in row["version_spans"]] == [VersionSpan(0, 2, 3), VersionSpan(2, 3, 4)]
    assert row["speculation"] == {"drafted": 2, "accepted": 1, "accepted_by_position": [1], "steps": 2}
    assert (row["finish_reason"], row["reward"]) == ("stop", 1.0)


def test_existing_file_is_continued_with_its_keys_and_sums(tmp_path: Path) -> None:
    write(tmp_path / "o", sample("p:1"), sample("p:2", 1, reward=0.0))
    with SampleFile.open(tmp_path / "o", ORIGIN, PROMPTS) as file:
        assert file.keys == {("p:1", 0), ("p:2", 1)}
        assert (file.tally.samples, file.tally.tokens, file.tally.num_rewarded, file.tally.reward_sum) == (2, 6, 2, 1.0)
        assert (file.tally.speculation.drafted, file.tally.speculation.accepted, file.tally.finish_reasons) == (4, 2, {"stop": 2})
        file.append(sample("p:2", 0, reward=None), "2+2=", "four")
        assert (file.tally.samples, file.tally.num_rewarded) == (3, 2)
    assert len((tmp_path / "o").read_text().splitlines()) == 3


@pytest.mark.parametrize("cut", [1, 2, 10, 300])
def test_incomplete_last_line_is_dropped_and_generated_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "o"
    write(path, sample("p:1"), sample("p:2"))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:-cut])
    with SampleFile.open(path, ORIGIN, PROMPTS) as file:
        assert file.keys == {("p:1", 0)}
        file.append(sample("p:2"), "2+2=", "two")
    assert path.read_bytes() == first + second


@pytest.mark.parametrize(
    "text", ["hello", "hello\n", '{"a": 1}\n', "[1]\n", '{"prompt_id": "p:1", "index": 0}\n', "without prompt", "list as id"]
)
def test_file_with_other_content_is_rejected_and_unchanged(tmp_path: Path, text: str) -> None:
    write(tmp_path / "o", sample("p:1"))
    row = json.loads((tmp_path / "o").read_text())
    changed = {"without prompt": {key: value for key, value in row.items() if key != "prompt"}, "list as id": row | {"prompt_id": ["p"]}}
    text = json.dumps(changed[text]) + "\n" if text in changed else text
    (tmp_path / "o").write_text(text)
    with pytest.raises(UserError, match="o:1: is not a sample that mtpctl rollout wrote"):
        SampleFile.open(tmp_path / "o", ORIGIN, PROMPTS)
    assert (tmp_path / "o").read_text() == text


@pytest.mark.parametrize(
    ("origin", "prompts", "message"),
    [
        (Origin("other", ORIGIN.settings), PROMPTS, "o:2: was sampled from recipe tiny"),
        (Origin("tiny", {"temperature": 0.5, "checkpoint": None}), PROMPTS, "o:2: was sampled from other weights or sampling settings"),
        (ORIGIN, {"p:1": "1+1=", "p:2": "3+3="}, "o:2: the prompt p:2 has changed"),
    ],
)
def test_a_file_never_mixes_origins(tmp_path: Path, origin: Origin, prompts: dict[str, str], message: str) -> None:
    write(tmp_path / "o", sample("p:1"), sample("p:2"))
    lines = (tmp_path / "o").read_bytes().splitlines(keepends=True)
    if origin is not ORIGIN:
        with SampleFile.open(tmp_path / "first", origin, prompts) as file:
            file.append(sample("p:1"), "1+1=", "two")
        lines[0] = (tmp_path / "first").read_bytes()
    (tmp_path / "o").write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=message):
        SampleFile.open(tmp_path / "o", origin, prompts)
    assert (tmp_path / "o").read_bytes() == b"".join(lines)


def test_second_writer_is_rejected(tmp_path: Path) -> None:
    with SampleFile.open(tmp_path / "o", ORIGIN, PROMPTS), pytest.raises(UserError, match="another process is writing"):
        SampleFile.open(tmp_path / "o", ORIGIN, PROMPTS)


def test_unwritable_path_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--out: .* cannot be written \(No such file or directory\)"):
        SampleFile.open(tmp_path / "no" / "o", ORIGIN, PROMPTS)
    with pytest.raises(UserError, match=r"--out: .* cannot be written \(Is a directory\)"):
        SampleFile.open(tmp_path, ORIGIN, PROMPTS)


def test_full_disk_gives_a_one_line_error() -> None:
    # /dev/full takes an open and refuses every byte.
    with (
        pytest.raises(UserError, match=r"/dev/full: cannot be written \(No space left on device\); free disk space"),
        Path("/dev/full").open("ab", buffering=0) as full,
    ):
        SampleFile(Path("/dev/full"), ORIGIN, full).append(sample(), "1+1=", "two")


def test_file_without_samples_is_deleted(tmp_path: Path) -> None:
    write(tmp_path / "o")
    assert not (tmp_path / "o").exists()
