"""Findings, errors and exit codes of the doctor. The parts are faked here; `test_parts` runs real ones."""

from __future__ import annotations

import asyncio
import json
import resource
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mtpctl.cluster.leftovers import Leftover
from mtpctl.cluster.links import Link
from mtpctl.doctor import checks
from mtpctl.doctor.checks import Diagnosis, examine, examine_model
from mtpctl.doctor.parts import Agreement, PartTimeout
from mtpctl.doctor.stack import packages
from mtpctl.errors import PrerequisiteMissing, RuntimeFailure, ThresholdMissed, UserError
from tests.fakes.toys import LLAMA_EAGLE3, MIMO, QWEN3_5

AGREED = Agreement(2, 40, 0.7, "fp32", mean_abs=1e-6, max_abs=1e-5, bound=1e-4, drafted=30, accepted=9)
PARTS: dict[str, Any] = {
    "kernels": {
        "device": "cpu",
        "auto": "chunked on cpu: it runs on any device",
        "implementations": [{"name": "chunked", "live": True}, {"name": "triton", "live": False, "reason": "needs CUDA"}],
    },
    "transports": {"transports": [{"name": "shm", "live": True, "reason": ""}, {"name": "nccl", "live": False, "reason": "needs CUDA"}]},
    "ray": {"version": "2.60.0", "answered": 42},
    "families": {"families": [{"name": name, "live": True, "reason": "", "lacks": None} for name in ("mimo", "qwen3.5", "qwen3.5-moe")]},
    "sample": {"tokens": 40, "seconds": 0.5},
    "score": asdict(AGREED),
}


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Any:
    def call(parts: dict[str, Any] | None = None, **options: Any) -> Diagnosis:
        results = {**PARTS, **(parts or {})}

        async def run_part(name: str, folder: Path, deadline_s: float) -> Any:
            if isinstance(results[name], Exception):
                raise results[name]
            return results[name]

        monkeypatch.setattr(checks, "run_part", run_part)
        return examine(**options)

    return call


def finding(diagnosis: Diagnosis, name: str) -> checks.Finding:
    return next(check.finding for check in diagnosis.checks if check.name == name)


def test_machine_without_failures_has_every_finding_and_exit_code_0(examined: Any) -> None:
    reported: list[str] = []
    diagnosis = examined(on_check=lambda check: reported.append(check.name))
    names = [check.name for check in diagnosis.checks]
    assert names == ["python", "machine", "gpus", "packages", "kernels", "transports", "ray", "sandbox", "families", "self-check"]
    assert set(reported) == set(names)
    document = diagnosis.to_dict()
    assert document["exit_code"] == 0 and diagnosis.error is None
    assert document["checks"]["self-check"]["data"]["accepted"] == 9
    assert "9 of 30 drafts accepted" in finding(diagnosis, "self-check").summary
    assert finding(diagnosis, "transports").summary == "shm live; nccl needs CUDA"


def test_quick_skips_the_self_check_and_reports_it(examined: Any) -> None:
    skipped = finding(examined({"sample": RuntimeFailure("must not run")}, quick=True), "self-check")
    assert skipped.state == "skipped" and "--quick" in skipped.summary


def test_log_probs_beyond_the_bound_give_exit_code_6_with_the_figures(examined: Any) -> None:
    diagnosis = examined({"score": asdict(AGREED) | {"mean_abs": 2e-4, "max_abs": 0.3}})
    assert isinstance(diagnosis.error, ThresholdMissed) and "2.00e-04" in str(diagnosis.error)
    assert finding(diagnosis, "self-check").data["max_abs"] == 0.3


def test_nan_log_probs_fail(examined: Any) -> None:
    assert isinstance(examined({"score": asdict(AGREED) | {"mean_abs": float("nan")}}).error, ThresholdMissed)


def test_failed_checks_are_named_and_the_others_still_run(examined: Any) -> None:
    diagnosis = examined({"ray": PrerequisiteMissing("Ray did not start"), "sample": RuntimeFailure("sample: crashed")})
    assert diagnosis.to_dict()["exit_code"] == 3
    assert str(diagnosis.error) == "Ray did not start (also failed: self-check)"
    assert finding(diagnosis, "kernels").state == "ok"


def test_missing_package_gives_exit_code_3_with_its_fix(examined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.stack, "project_requirements", lambda: ["nonesuch==1.0", "rich>=13.7", "typer>=999"])
    diagnosis = examined()
    assert isinstance(diagnosis.error, PrerequisiteMissing)
    assert str(diagnosis.error) == "nonesuch: is not installed; run pip install 'nonesuch==1.0' in this environment (also: typer)"


def test_self_check_is_skipped_without_vllm(examined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert finding(examined({"sample": RuntimeFailure("must not run")}), "self-check").state == "skipped"


def test_wrong_kernel_selected_by_auto_gives_exit_code_6(examined: Any) -> None:
    wrong = {"name": "chunked", "live": False, "reason": "is 3.0e+00 off the reference"}
    diagnosis = examined({"kernels": PARTS["kernels"] | {"implementations": [wrong, {"name": "reference", "live": True}]}})
    assert diagnosis.to_dict()["exit_code"] == 6


@pytest.mark.parametrize(
    "error", [PartTimeout("ray: no answer within 120 s"), PrerequisiteMissing("Ray did not start: the node timed out")]
)
def test_timeout_on_a_loaded_machine_is_reported_as_loaded(error: Exception, examined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (20.0, 20.0, 20.0))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    diagnosis = examined({"ray": error})
    assert finding(diagnosis, "ray").state == "loaded"
    assert diagnosis.verdict == "the machine is too loaded for a verdict"
    assert f"{error}; the machine is loaded (20.0 processes want its 2 CPUs)" in str(diagnosis.error)
    assert type(diagnosis.error) is type(error)


def test_timeout_on_an_idle_machine_is_a_failure(examined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (3.9, 0.0, 0.0))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    diagnosis = examined({"ray": PartTimeout("ray: no answer within 120 s")})
    assert finding(diagnosis, "ray").state == "failed" and diagnosis.verdict == "not fit to run"


def test_crash_is_a_failure_under_any_load(examined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (20.0, 20.0, 20.0))
    diagnosis = examined({"kernels": RuntimeFailure("kernels: ended with code 1")})
    assert finding(diagnosis, "kernels").state == "failed" and diagnosis.verdict == "not fit to run"


def test_leftovers_of_killed_runs_are_reported(examined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.leftovers, "find", lambda: [Leftover(Path("/dev/shm/mtpctl-run"), 15 << 30)])
    machine = finding(examined(), "machine")
    assert machine.summary.endswith("killed runs left 1 folder(s), 15 GiB: the next start removes them, or mtpctl clean")
    assert machine.data["leftovers"] == [{"path": "/dev/shm/mtpctl-run", "bytes": 15 << 30}]


def test_limits_and_nccl_settings_of_a_container_are_reported(examined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    soft = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_NPROC: 99, resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda number: (soft[number], resource.RLIM_INFINITY))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "bond0")
    machine = finding(examined(), "machine")
    assert "limits: 1024 open files, 99 processes, unlimited locked bytes; " in machine.summary
    assert "NCCL_SOCKET_IFNAME=bond0" in machine.summary and machine.data["limits"]["locked bytes"] is None


def test_family_that_vllm_cannot_import_is_named_with_the_fix(examined: Any) -> None:
    rows = [
        row | ({} if row["name"] == "mimo" else {"live": False, "reason": "No module named 'torchvision'", "lacks": "torchvision"})
        for row in PARTS["families"]["families"]
    ]
    diagnosis = examined({"families": {"families": rows}})
    assert diagnosis.to_dict()["exit_code"] == 3 and "vLLM serves mimo" in finding(diagnosis, "families").summary
    assert str(diagnosis.error) == (
        "families: vLLM cannot serve qwen3.5, qwen3.5-moe here: No module named 'torchvision'; "
        "install torchvision in the release that pyproject.toml names"
    )


@pytest.mark.parametrize(
    ("version", "state"), [("0.6.0", "installed"), ("0.5.0", "0.5.0 is installed, ==0.6.0 is needed"), (None, "not installed")]
)
def test_optional_package_is_reported_with_its_purpose(version: str | None, state: str) -> None:
    lines = ["torch==2.13.0", "flash-linear-attention==0.6.0; extra == 'gpu'"]
    versions = {"torch": "2.13.0", "flash-linear-attention": version}
    package = asyncio.run(checks.packages(packages(lines, "gpu", versions.get)))
    assert package.state == "ok" and package.error is None
    assert f"optional: flash-linear-attention {state} (for linear attention of Qwen3-Next and Qwen3.5 in the trainer" in package.summary
    assert package.summary.startswith(f"all {2 if state == 'installed' else 1} in the required versions")


GOOD = Link("a", "b", 1e-4, 1e9)


@pytest.mark.parametrize(
    ("measured", "state", "error", "summary"),
    [
        ([], "absent", None, "the cluster has one host"),
        ([GOOD, GOOD], "ok", None, "2 pairs of hosts, 1.00 GB/s in the median"),
        ([GOOD, GOOD, Link("b", "c", 1e-4, 1e8)], "failed", ThresholdMissed, "slow: b – c: 0.10 GB/s"),
        ([GOOD, Link("b", "c", error="not reached: refused")], "failed", PrerequisiteMissing, "slow: b – c: not reached: refused"),
    ],
)
def test_links_between_hosts(measured: list[Link], state: str, error: type[Exception] | None, summary: str) -> None:
    finding = checks.links(measured)
    assert finding.state == state and summary in finding.summary
    assert finding.error is None if error is None else type(finding.error) is error


def test_folder_file_and_name_are_examined(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIMO))
    (tmp_path / "other.json").write_text(json.dumps(QWEN3_5))
    for name, family in {str(tmp_path): "mimo", str(tmp_path / "other.json"): "qwen3.5", "glm-4.5-air": "glm4-moe"}.items():
        diagnosis = examine_model(name)
        rows = {check.name: check.finding for check in diagnosis.checks}
        assert f"({family})" in rows["model"].summary and rows["drafter"].summary == "1 MTP layer"
        assert diagnosis.verdict == "supported" and diagnosis.error is None
        assert ("vLLM on a CPU" in rows) == (family == "qwen3.5")


def test_drafter_folder_is_part_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in LLAMA_EAGLE3.items() if key != "drafter"}))
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(LLAMA_EAGLE3["drafter"]))
    rows = {check.name: check.finding for check in examine_model(str(tmp_path)).checks}
    assert rows["vLLM"].summary == "drafts with its EAGLE-3 drafter"
    assert rows["SGLang"].state == "absent"


def test_unsupported_models_and_missing_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^zai-org/GLM-5: GLM-5 is not supported: "):
        examine_model("zai-org/GLM-5")
    with pytest.raises(UserError, match=r"^--model: .* has no config.json"):
        examine_model(str(tmp_path))
    with pytest.raises(UserError, match=r"^--model: there is no folder "):
        examine_model(str(tmp_path / "nowhere"))
