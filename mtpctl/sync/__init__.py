"""How weights travel: publisher and version store on the sender's side, matching names and receivers on the other."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpctl.sync.checksums import checksum
    from mtpctl.sync.manifest import Manifest, SectionPlan
    from mtpctl.sync.protocol import (
        PauseMode,
        PlanMismatch,
        Published,
        Section,
        SyncError,
        TargetDirty,
        VersionConflict,
        WeightsDiffer,
        WeightTarget,
    )
    from mtpctl.sync.publisher import Publisher
    from mtpctl.sync.sender import Sender
    from mtpctl.sync.session import SyncReport, check_checksums, or_cancel, update_target
    from mtpctl.sync.store import VersionStore, default_root, name_of
    from mtpctl.sync.transports import Sent

_HOMES = {
    "checksum": "checksums",
    "Manifest": "manifest",
    "SectionPlan": "manifest",
    "PauseMode": "protocol",
    "PlanMismatch": "protocol",
    "Published": "protocol",
    "Section": "protocol",
    "SyncError": "protocol",
    "TargetDirty": "protocol",
    "VersionConflict": "protocol",
    "WeightTarget": "protocol",
    "WeightsDiffer": "protocol",
    "Publisher": "publisher",
    "Sender": "sender",
    "SyncReport": "session",
    "or_cancel": "session",
    "check_checksums": "session",
    "update_target": "session",
    "VersionStore": "store",
    "Sent": "transports",
    "default_root": "store",
    "name_of": "store",
}

__all__ = [
    "Manifest",
    "PauseMode",
    "PlanMismatch",
    "Published",
    "Publisher",
    "Section",
    "SectionPlan",
    "Sender",
    "Sent",
    "SyncError",
    "SyncReport",
    "TargetDirty",
    "VersionConflict",
    "VersionStore",
    "WeightTarget",
    "WeightsDiffer",
    "check_checksums",
    "checksum",
    "default_root",
    "name_of",
    "or_cancel",
    "update_target",
]


def __getattr__(name: str) -> Any:
    """Import on first use: the publisher brings torch along."""
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(import_module(f"mtpctl.sync.{_HOMES[name]}"), name)
