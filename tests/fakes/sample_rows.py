"""Rows of the sample log."""

from __future__ import annotations

from mtpctl.samples import Sample, Speculation
from mtpctl.telemetry.sample_log import Kind, SampleRow, sample_row


def kept(step: int, reward: float | None, response: str = "a", *, kind: Kind = "update", note: str = "") -> SampleRow:
    sample = Sample("p", "g", [ord("?")], reward=reward, reward_parts={"format": 1.0}, finish_reason="stop")
    sample.append([ord(c) for c in response], [0.0] * len(response), 3)
    sample.append([ord("<")], [0.0], 4, trained=False)
    sample.speculation = Speculation(drafted=4, accepted=3, steps=2)
    return sample_row(sample, lambda ids: "".join(map(chr, ids)), step=step, kind=kind, answer="<b>", note=note)
