"""`mtpctl clean`: what killed runs left on this machine, removed."""

from __future__ import annotations

import json

from mtpctl.cli.answers import answer
from mtpctl.cli.options import Json


def clean(as_json: Json = False) -> None:
    """Remove weight versions and Ray sessions that killed runs left here. What a live process uses stays."""
    from mtpctl.cluster import leftovers

    gone, unknown = leftovers.remove(), leftovers.unknown()
    if as_json:
        rows = [{"path": str(left.path), "bytes": left.nbytes} for left in gone]
        answer(json.dumps({"removed": rows, "unknown": [str(path) for path in unknown]}, indent=2))
        return
    for left in gone:
        answer(f"removed {left.path} ({left.nbytes / 2**30:.3g} GiB)")
    if not gone:
        answer("killed runs left nothing here")
    for path in unknown:
        answer(f"left alone: {path} does not tell whose it is; remove it by hand once no run uses it")
