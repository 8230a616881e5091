"""The trainer's logits of each MTP depth, on a CPU: `python -m tests.fakes.draft_depths FOLDER PRECISION SAMPLES.json OUT.pt`.

SAMPLES: `samples`, for each its token ids and the position whose logits are requested, and `routes` (see `depth_logits`).
OUT: [samples, depths, vocabulary].
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.families.reading import shape_of
from mtpctl.model.packing import Packing
from mtpctl.recipe.model import MtpConfig
from mtpctl.routes import Routes
from tests.fakes.engine_drafts import DRAFTS
from tests.fakes.tiny import engine


def main(folder: str, precision: str, samples: str, out: str) -> None:
    samples_by_case = json.loads(Path(samples).read_text())
    routes = None if samples_by_case["routes"] is None else np.array(samples_by_case["routes"], np.uint8)
    torch.save(depth_logits(folder, precision, samples_by_case["samples"], routes), out)


def depth_logits(folder: str | Path, precision: str, requested: list[tuple[list[int], int]], routes: Routes | None = None) -> torch.Tensor:
    """Logits [samples, depths, vocabulary] at the requested position of each sample's token ids.

    routes: experts of the tokens that all samples share, which each sample replays up to its position.

    The process must have no process groups, as with a running engine.
    """
    lengths = [len(ids) for ids, _ in requested]
    flat = torch.tensor([token for ids, _ in requested for token in ids])
    source = HfFolder.open(folder)
    mtp = MtpConfig(mode="load", repeat=DRAFTS if shape_of(source.config).mtp_layers == 1 else 1)
    with engine(source, precision=precision, mtp=mtp) as created, torch.no_grad():
        packing = Packing.of(lengths, "cpu")
        if routes is not None:
            packing = replayed(packing, [routes[: position + 1] for _, position in requested])
        hidden = created.module(flat, packing, depths=DRAFTS)
        depths = [(state @ hidden.head.T).float().split(lengths) for state in hidden.mtp]
    result = [torch.stack([depth[number][position] for depth in depths]) for number, (_, position) in enumerate(requested)]
    return torch.stack(result)


def replayed(packing: Packing, routes: list[Routes]) -> Packing:
    """Replay the routes of each sample's first tokens."""
    total = sum(packing.sample_lengths)
    experts = torch.zeros(total, *routes[0].shape[1:], dtype=torch.uint8)
    routed = torch.zeros(total, dtype=torch.bool)
    for rows, start in zip(routes, packing.starts.tolist(), strict=False):
        experts[start : start + len(rows)] = torch.from_numpy(rows)
        routed[start : start + len(rows)] = True
    return replace(packing, routes=experts, routed=routed)


if __name__ == "__main__":
    main(*sys.argv[1:])
