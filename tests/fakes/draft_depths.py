"""The trainer's logits of each MTP depth, on a CPU: `python -m tests.fakes.draft_depths FOLDER PRECISION SAMPLES.json OUT.pt`.

SAMPLES: for each sample its token ids and the position whose logits are requested. OUT: [samples, depths, vocabulary].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.families.reading import shape_of
from mtpctl.model.packing import Packing
from mtpctl.recipe.model import MtpConfig
from tests.fakes.engine_drafts import DRAFTS
from tests.fakes.tiny import engine


def main(folder: str, precision: str, samples: str, out: str) -> None:
    torch.save(depth_logits(folder, precision, json.loads(Path(samples).read_text())), out)


def depth_logits(folder: str | Path, precision: str, requested: list[tuple[list[int], int]]) -> torch.Tensor:
    """Logits [samples, depths, vocabulary] at the requested position of each sample's token ids.

    The process must have no process groups, as with a running engine.
    """
    lengths = [len(ids) for ids, _ in requested]
    flat = torch.tensor([token for ids, _ in requested for token in ids])
    source = HfFolder.open(folder)
    mtp = MtpConfig(mode="load", repeat=DRAFTS if shape_of(source.config).mtp_layers == 1 else 1)
    with engine(source, precision=precision, mtp=mtp) as created, torch.no_grad():
        hidden = created.module(flat, Packing.of(lengths, "cpu"), depths=DRAFTS)
        depths = [(state @ hidden.head.T).float().split(lengths) for state in hidden.mtp]
    result = [torch.stack([depth[number][position] for depth in depths]) for number, (_, position) in enumerate(requested)]
    return torch.stack(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
