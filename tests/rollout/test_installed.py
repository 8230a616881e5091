"""An engine's options are known without importing it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.rollout import SglangConfig, VllmConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.rollout import installed
from mtpctl.rollout.installed import check_engine, check_engine_args, read_fields, read_option_names


def recipe(*sets: str) -> Recipe:
    return load_recipe("tiny_mtp", sets=sets).recipe


def test_the_options_read_from_vllms_source_are_those_of_its_class() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert read_option_names(VllmConfig()) == {field.name for field in fields(AsyncEngineArgs)}


def test_reading_engine_options_does_not_import_vllm_or_torch() -> None:
    code = (
        "import sys; from mtpctl.recipe.rollout import VllmConfig; from mtpctl.rollout.installed import read_option_names; "
        "assert 'max_num_seqs' in read_option_names(VllmConfig()); assert not {'vllm', 'torch', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_vllm_option_is_rejected_with_the_closest_one() -> None:
    check_engine(recipe("rollout.engine_args={max_num_batched_tokens: 64}"))
    with pytest.raises(UserError, match=r"^rollout\.engine_args\.max_num_seq: vLLM has no such option; did you mean max_num_seqs\?$"):
        check_engine(recipe("rollout.engine_args={max_num_seq: 1}"))
    with pytest.raises(UserError, match=r"^rollout\.engine_args\.foo: vLLM has no such option; leave it out$"):
        check_engine(recipe("rollout.engine_args={foo: 1}"))


def test_options_are_not_checked_for_a_joined_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    check_engine(recipe("rollout.engine_args={foo: 1}", "cluster.address=host:6379"))
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    check_engine_args(recipe("rollout.engine_args={foo: 1}"))
    with pytest.raises(PrerequisiteMissing, match=r"^rollout\.engine: vllm is not installed; install"):
        check_engine(recipe())


def test_sglang_options_are_read_from_the_installation_of_the_configured_interpreter(tmp_path: Path) -> None:
    source = tmp_path / "lib" / "python3.12" / "site-packages" / "sglang" / "srt" / "server_args.py"
    source.parent.mkdir(parents=True)
    source.write_text("class ServerArgs:\n    model_path: str\n    tp_size: int = 1\n    KINDS: ClassVar[int] = 2\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    created = SglangConfig(engine="sglang", python=str(tmp_path / "bin" / "python"), engine_args={"tp_sise": 2})
    assert read_option_names(created) == {"model_path", "tp_size"}
    with pytest.raises(UserError, match=r"tp_sise: SGLang has no such option; did you mean tp_size\?"):
        check_engine_args(recipe().model_copy(update={"rollout": created}))
    assert not read_option_names(SglangConfig(engine="sglang", python=str(tmp_path / "elsewhere" / "bin" / "python")))


def test_base_class_from_another_file_makes_options_unknown(tmp_path: Path) -> None:
    source = tmp_path / "args.py"
    source.write_text("class A(msgspec.Struct):\n    a: int\nclass B(A):\n    b: int = 0\nclass C(A, Elsewhere):\n    c: int\n")
    assert read_fields(source, "B") == {"a", "b"}
    assert read_fields(source, "C") == read_fields(source, "D") == frozenset()
