"""`mtpctl doctor RUN`: compare the files of a run's checkpoints with their checksums."""

from __future__ import annotations

import time
from pathlib import Path

from mtpctl.bench.doctor.examination import Check, Diagnosis, Finding
from mtpctl.checkpoint.finding import check, damaged_in, saved_in
from mtpctl.checkpoint.listing import Damaged, read_listing
from mtpctl.controller.resuming import REFERENCE
from mtpctl.errors import ThresholdMissed, UserError
from mtpctl.telemetry.run_directory import RunDirectory


def examine_run(run: Path) -> Diagnosis:
    """Verify the checkpoints of a run, newest first, and the initial policy of its RL. Raises UserError if `run` is not a run directory."""
    directory, began = RunDirectory(run), time.perf_counter()
    if not directory.recipe.is_file():
        raise UserError(f"{run}: is not a run directory; name one that has {directory.recipe.name}")
    checks = [_examined(path, of_run=True) for path in saved_in(directory.checkpoints)]
    if (reference := directory.path / REFERENCE).is_dir():
        checks.append(_examined(reference, of_run=False))
    aside = "is damaged, and was renamed by an earlier start: no run resumes from it"
    checks += [Check(path.name, Finding("absent", aside), 0.0) for path in damaged_in(directory.checkpoints)]
    if not checks:
        checks = [Check("checkpoints", Finding("absent", "the run has none yet"), 0.0)]
    return Diagnosis(checks, time.perf_counter() - began, failure="damaged")


def _examined(path: Path, *, of_run: bool) -> Check:
    began = time.perf_counter()
    try:
        verified = check(path, contents=True, of_run=of_run)
        listing = read_listing(path)
    except Damaged as damage:
        error = ThresholdMissed(f"{path}/{damage}; restore it, or resume: the run uses its newest whole checkpoint, and keeps this one")
        return Check(
            path.name, Finding("failed", str(damage), {"file": damage.file, "damage": damage.what}, error), time.perf_counter() - began
        )
    if not verified or listing is None:
        finding = Finding("absent", "was saved without checksums, by an earlier release: its contents are not verified")
    else:
        size = f"{listing.nbytes / (1 << 30):,.2f} GiB" if listing.nbytes >= 1 << 30 else f"{listing.nbytes / (1 << 20):,.1f} MiB"
        data = {"files": len(listing.files), "bytes": listing.nbytes}
        finding = Finding("ok", f"{len(listing.files)} files, {size}, match their checksums", data)
    return Check(path.name, finding, time.perf_counter() - began)
