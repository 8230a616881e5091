"""`mtpctl clean`: remove what killed runs left on this machine."""

from __future__ import annotations

import json

from mtpctl.cli.answers import answer
from mtpctl.cli.options import Json


def clean(as_json: Json = False) -> None:
    """Remove weight versions and Ray sessions that killed runs left here. What a live process uses stays."""
    from mtpctl.cluster import leftovers

    gone, staying = leftovers.remove(), [left.path for left in leftovers.find()]
    unknown, elsewhere = leftovers.unknown(), leftovers.elsewhere()
    if as_json:
        rows = [{"path": str(left.path), "bytes": left.nbytes} for left in gone]
        others = {"not_removed": staying, "unknown": unknown, "elsewhere": elsewhere}
        answer(json.dumps({"removed": rows} | {what: [str(path) for path in paths] for what, paths in others.items()}, indent=2))
        return
    for left in gone:
        answer(f"removed {left.path} ({left.nbytes / 2**30:.3g} GiB)")
    for path in staying:
        answer(f"not removed: {path}; another process removes it just now, or it cannot be removed")
    if not gone and not staying:
        answer("killed runs left nothing here")
    for path in unknown:
        answer(f"left alone: {path} does not tell whose it is; remove it by hand once no run uses it")
    for path in elsewhere:
        answer(f"left alone: {path} was made elsewhere, in another container or before this boot; remove it by hand once no run uses it")
