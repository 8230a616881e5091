"""One update of one target, from the first check to the last checksum."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Collection
from dataclasses import dataclass

from mtpctl.sync.manifest import Manifest
from mtpctl.sync.protocol import Section, SyncError, TargetDirty, WeightsDiffer, WeightTarget
from mtpctl.sync.transports.base import cancel


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one update moved and how long it took: `seconds` in all, `stall_seconds` from pause to resume where one paused."""

    version: int
    nbytes: int
    seconds: float
    stall_seconds: float = 0.0
    verified: int = 0


def check_checksums(manifest: Manifest, found: dict[str, str], holds: Collection[str] = ("target", "draft", "adapter")) -> int:
    """Compare a target's checksums with the sender's, for the sections that it holds. Returns the number of tensors that agree.

    Raises WeightsDiffer that names the tensors that differ or are missing, SyncError where the publisher took no checksums.
    """
    wanted = _published_checksums(manifest, holds)
    differing = [name for name, value in wanted.items() if found.get(name) != value]
    if differing:
        raise WeightsDiffer(f"after the sync to version {manifest.version} these tensors differ from what was sent: {', '.join(differing)}")
    return len(wanted)


def _published_checksums(manifest: Manifest, holds: Collection[str]) -> dict[str, str]:
    wanted = {name: value for place, section in manifest.sections.items() if place in holds for name, value in section.checksums.items()}
    if not wanted:
        raise SyncError(f"version {manifest.version} was published without checksums to compare with")
    return wanted


async def or_cancel[T](manifest: Manifest, update: Awaitable[T]) -> T:
    """The result of a target's update. Where it fails, the others in the same transfer are told, so that they need not wait."""
    try:
        return await update
    except BaseException as error:
        await asyncio.to_thread(cancel, manifest, f"a receiver of the weights gave up: {error}")
        raise


async def update_target(
    target: WeightTarget,
    manifest: Manifest,
    *,
    verify: bool = False,
    deadline_s: float = 120.0,
    holds: Collection[Section] = ("target", "draft", "adapter"),
) -> SyncReport:
    """Have `target` receive all sections of `manifest` and go live with them, or leave it at the version that it had.

    A target that generates has been paused by the caller. A fault at any point aborts the update, and so does `deadline_s`; returning to
    the version before may take as long again. `holds`: the sections whose checksums the target can tell, for `verify`.

    Raises SyncError where the version before is live again, TargetDirty where the target could not return to it, and with `verify`
    WeightsDiffer where the new version is live and is not what was sent: the target serves no more.
    """
    started = time.monotonic()
    if verify:
        _published_checksums(manifest, holds)

    async def within[T](step: Awaitable[T]) -> T:
        return await asyncio.wait_for(step, deadline_s - (time.monotonic() - started))

    try:
        for name, section in manifest.sections.items():
            await within(target.begin_update(manifest, manifest.version, name))
            await within(target.receive(*section.buckets))
            await within(target.finish_update())
    except BaseException as error:
        try:
            await asyncio.wait_for(target.abort_update(), deadline_s)
        except (TimeoutError, asyncio.CancelledError) as late:
            # How far it came on its way back is not known.
            target.distrust()
            if isinstance(late, asyncio.CancelledError):
                raise
            raise TargetDirty(
                f"the sync to version {manifest.version} broke off, and giving it up took longer than {deadline_s:g} s"
            ) from error
        except TargetDirty as dirty:
            raise TargetDirty(f"{dirty}, after {type(error).__name__}: {error}") from error
        if isinstance(error, TimeoutError):
            raise SyncError(f"the sync to version {manifest.version} took longer than sync.deadline_s = {deadline_s}") from error
        raise
    verified = 0
    if verify:
        # The update is complete and live, and cannot be given up any more.
        try:
            verified = check_checksums(manifest, await within(target.checksums()), holds)
        except BaseException as error:
            target.distrust()
            if isinstance(error, TimeoutError):
                raise TargetDirty(f"version {manifest.version} could not be verified within sync.deadline_s = {deadline_s}") from error
            raise
    return SyncReport(manifest.version, manifest.nbytes, time.monotonic() - started, verified=verified)
