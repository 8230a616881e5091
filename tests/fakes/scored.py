"""Scores an engine's samples with the trainer in bf16, under their routes and without. `python -m tests.fakes.scored FOLDER FILE`

Prints the differences of both log-probs in nats, mean and largest, and the share of routes that the trainer would have taken too.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtpctl.compat import cpu_device
from mtpctl.samples import Sample


def main(folder: str, file: str) -> None:
    print(json.dumps(scored(folder, [Sample.from_dict(each) for each in json.loads(Path(file).read_text())])))


def scored(folder: str | Path, samples: list[Sample]) -> dict[str, dict[str, Any]]:
    """The differences, by `own` and `replayed`. The process must have no process groups, as with a running engine."""
    cpu_device.install()
    torch.set_num_threads(1)
    from mtpctl.convert.hf_folder import HfFolder
    from mtpctl.recipe.model import MtpConfig
    from mtpctl.recipe.section import ParallelConfig
    from mtpctl.trainer.config import EngineConfig
    from mtpctl.trainer.engine import MegatronEngine
    from tests.fakes.sequences import sequences_of

    tokens = max(512, *(sample.length for sample in samples))
    config = EngineConfig(ParallelConfig(), precision="bf16", mtp=MtpConfig(mode="off"), tokens_per_microbatch=tokens, train=False)
    engine = MegatronEngine(HfFolder.open(folder), config)
    result: dict[str, dict[str, Any]] = {}
    for replay in (False, True):
        scores = engine.score([s if replay else replace(s, routes=None) for s in sequences_of(samples)], record_routes=True)
        apart = np.concatenate([np.abs(np.subtract(a.logprobs, s.behaviour_logprobs)) for a, s in zip(scores, samples, strict=True)])
        result["replayed" if replay else "own"] = {"mean": float(apart.mean()), "max": float(apart.max())}
        if not replay and samples[0].routes is not None:
            pairs = [(a.routes[: s.num_routed], s.routes) for a, s in zip(scores, samples, strict=True) if a.routes is not None]
            same = [(mine[..., None] == theirs[..., None, :]).any(-1).ravel() for mine, theirs in pairs if theirs is not None]
            result["own"]["agreement"] = float(np.concatenate(same).mean())
    engine.close()
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
