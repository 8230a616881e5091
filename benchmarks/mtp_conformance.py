"""A conformance test for the training of multi-token-prediction (MTP) heads: losses and gradients of small batches, in float64.

    python benchmarks/mtp_conformance.py                                                    # the cases and their expected losses
    python benchmarks/mtp_conformance.py --trainer benchmarks/conformance/megatron_core.py  # a trainer's results
    python benchmarks/mtp_conformance.py --write-pins                                       # after a case was added

A trainer is a Python file that defines `TRAINERS: dict[str, Trainer]`; docs/benchmarks/mtp-conformance.md describes model, cases and
conventions. This file needs only torch. Exit code 6 if a trainer fails a case. `mtp_conformance.json` has losses and gradient norms of
every case, for trainers that do not run Python.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

HIDDEN, VOCAB, EPS = 16, 32, 1e-5
TOLERANCE = 1e-5
"""Largest relative error of a loss and of a tensor's gradient. It suits fp32; the faults of the cases change results by percents."""
SHARED = ("embedding", "head", "norm")
"""The trunk's tensors, which a detached loss must not train."""
PINS = Path(__file__).with_suffix(".json")
FAILED = 6


@dataclass(frozen=True)
class Convention:
    """The choices that trainers make differently.

    supervised: `target` counts row t at depth k if token t + k + 1 was sampled; `chain` if all of t + 1 … t + k + 1 were. trunk_state:
    whether depth 1 reads the trunk's state after its final norm (`normed`: DeepSeek-V3, Megatron) or before it (`unnormed`: MiMo).
    """

    supervised: Literal["target", "chain"]
    trunk_state: Literal["normed", "unnormed"]

    def counts(self, mask: list[int], row: int, depth: int) -> bool:
        target = row + depth + 1
        return all(mask[row + 1 : target + 1]) if self.supervised == "chain" else bool(mask[target])


@dataclass(frozen=True)
class Sample:
    """mask: 1 for the tokens that the policy sampled."""

    tokens: list[int]
    mask: list[int]


@dataclass(frozen=True)
class Row:
    """A microbatch: samples in one row, each padded with token 0 to a multiple of `alignment`."""

    samples: list[Sample]
    alignment: int

    @property
    def cu_seqlens(self) -> list[int]:
        """Cumulative lengths without padding. Equal to those with padding if no sample needs any."""
        return [0, *accumulate(len(sample.tokens) for sample in self.samples)]

    @property
    def cu_seqlens_padded(self) -> list[int]:
        return [0, *accumulate(len(self._padded(sample.tokens)) for sample in self.samples)]

    @property
    def tokens(self) -> list[int]:
        return [token for sample in self.samples for token in self._padded(sample.tokens)]

    @property
    def mask(self) -> list[int]:
        return [bit for sample in self.samples for bit in self._padded(sample.mask)]

    def _padded(self, values: list[int]) -> list[int]:
        return values + [0] * (-len(values) % self.alignment)


@dataclass(frozen=True)
class Case:
    """A batch and the model that is trained on it.

    ranks: the samples of each data-parallel rank, as strings with a letter per token: p prompt, r response, t tool output within the
    response. split: every sample is a microbatch; else a rank has one. cp: context-parallel ranks of each data-parallel rank. depths: MTP
    depths, each with a layer, or one layer for all if `repeated`. tied: the head is the embedding. detached: only MTP layers are trained.
    """

    name: str
    ranks: tuple[tuple[str, ...], ...]
    depths: int = 2
    tied: bool = False
    detached: bool = False
    repeated: bool = False
    split: bool = False
    cp: int = 1
    alignment: int = 1

    def rows(self) -> list[list[Row]]:
        """The microbatches of each data-parallel rank."""
        draw = random.Random(self.name)
        ranks = []
        for letters in self.ranks:
            samples = [Sample([draw.randrange(1, VOCAB) for _ in text], [int(letter == "r") for letter in text]) for text in letters]
            ranks.append([Row([sample], self.alignment) for sample in samples] if self.split else [Row(samples, self.alignment)])
        return ranks

    def samples(self) -> Iterator[Sample]:
        for rows in self.rows():
            for row in rows:
                yield from row.samples

    def weights(self) -> dict[str, Tensor]:
        """The model's tensors in float64; their values are exact in fp32. `N.` starts the name of a tensor of the Nth MTP layer."""
        draw = random.Random(0)

        def numbers(*shape: int, mean: float = 0.0, spread: float = 0.5) -> Tensor:
            values = [round(1024 * draw.gauss(mean, spread)) / 1024 for _ in range(torch.Size(shape).numel())]
            return torch.tensor(values, dtype=torch.float64).view(shape)

        def scales() -> Tensor:
            return numbers(HIDDEN, mean=1.0, spread=0.2)

        weights = {"embedding": numbers(VOCAB, HIDDEN), "head": numbers(VOCAB, HIDDEN), "norm": scales()}
        if self.tied:
            del weights["head"]
        for layer in range(1, 2 if self.repeated else self.depths + 1):
            weights |= {f"{layer}.{name}": scales() for name in ("embedding_norm", "state_norm", "norm")}
            weights |= {f"{layer}.{name}": numbers(HIDDEN, HIDDEN) for name in ("embedding_projection", "state_projection")}
        return weights


TURNS, LONG, SHORT = "pppprrrrttrrrrr", "ppprrrrrrrrrr", "pppprrr"
CASES = (
    Case("one sample", (("pppprrrrrr",),), depths=1),
    Case("two turns", ((TURNS,),)),
    Case("three depths", ((TURNS, LONG),), depths=3),
    Case("three depths, tied", ((TURNS, LONG),), depths=3, tied=True),
    Case("three depths of one layer", ((TURNS, LONG),), depths=3, repeated=True),
    Case("detached", ((TURNS, LONG),), detached=True),
    Case("detached, tied", ((TURNS, LONG),), detached=True, tied=True),
    Case("packed", ((SHORT, TURNS, LONG),)),
    Case("packed, padded", ((SHORT, TURNS, LONG),), alignment=4),
    Case("uneven microbatches", ((SHORT, LONG + "rrrrrr"),), split=True),
    Case("uneven ranks", ((SHORT,), (LONG, TURNS))),
    Case("uneven ranks, detached, tied", ((SHORT,), (LONG, TURNS)), detached=True, tied=True),
    Case("rank with nothing to draft", (("ppr",), (LONG,))),
    Case("cp 2", (("pppppprrrrrrrrrr",),), cp=2, alignment=4),
    Case("cp 2, packed", (("pppprrrrrrrrrrrr", "pprrrrrr"),), cp=2, alignment=4),
    Case("cp 2, packed, padded", ((LONG, TURNS, SHORT),), cp=2, alignment=4),
)
CONVENTIONS = [Convention(supervised, state) for supervised in ("target", "chain") for state in ("normed", "unnormed")]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Result:
    """losses: of each depth. gradients: of the mean of the depths' losses, summed over ranks and microbatches, for each tensor of
    `Case.weights`."""

    losses: list[float]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Trainer:
    """run: trains on a case without updating weights. It starts the case's ranks itself."""

    convention: Convention
    run: Callable[[Case], Result]


def normed(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean() + EPS) * scale


def draft_state(weights: dict[str, Tensor], sample: Sample, row: int, depth: int, case: Case, convention: Convention) -> Tensor:
    """The state of depth `depth` at row `row`, from which token row + depth + 1 is predicted. Depth 0 is the trunk."""
    embedding = weights["embedding"][sample.tokens[row + depth]]
    if depth == 0:
        return normed(embedding, weights["norm"]) if convention.trunk_state == "normed" else embedding
    layer = f"{1 if case.repeated else depth}."
    before = draft_state(weights, sample, row, depth - 1, case, convention)
    from_embedding = weights[f"{layer}embedding_projection"] @ normed(embedding, weights[f"{layer}embedding_norm"])
    from_state = weights[f"{layer}state_projection"] @ normed(before, weights[f"{layer}state_norm"])
    return normed(from_embedding + from_state, weights[f"{layer}norm"])


def reference(case: Case, convention: Convention) -> Result:
    """Losses and gradients by definition, one token after another: a depth's loss is the mean over all its supervised tokens."""
    leaves = {name: value.requires_grad_() for name, value in case.weights().items()}
    weights = {name: leaf.detach() if case.detached and name in SHARED else leaf for name, leaf in leaves.items()}
    head = weights["embedding" if case.tied else "head"]
    losses = []
    for depth in range(1, case.depths + 1):
        terms = [
            -(head @ draft_state(weights, sample, row, depth, case, convention)).log_softmax(-1)[sample.tokens[row + depth + 1]]
            for sample in case.samples()
            for row in range(len(sample.tokens) - depth - 1)
            if convention.counts(sample.mask, row, depth)
        ]
        losses.append(torch.stack(terms).mean())
    torch.stack(losses).mean().backward()
    gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return Result([float(loss.detach()) for loss in losses], gradients)


def verdict(result: Result, expected: Result) -> str:
    """Return `pass`, or the factors by which the losses and the gradient differ from the expected ones.

    The gradient's factor is that of its component along the expected gradient; its error is relative to the norm of the latter.
    """
    assert result.gradients.keys() == expected.gradients.keys(), sorted(result.gradients.keys() ^ expected.gradients.keys())
    gradients = [(result.gradients[name].double(), right) for name, right in expected.gradients.items()]
    exact = torch.cat([right.flatten() for _, right in gradients])
    actual = torch.cat([gradient.flatten() for gradient, _ in gradients])
    floor = 1e-3 * float(exact.norm())
    wrong_gradient = any(not (gradient - right).norm() <= TOLERANCE * max(float(right.norm()), floor) for gradient, right in gradients)
    ratios = [loss / right for loss, right in zip(result.losses, expected.losses, strict=True)]
    wrong_loss = any(not abs(ratio - 1) <= TOLERANCE for ratio in ratios)
    parts = [f"loss × {', '.join(f'{ratio:.3f}' for ratio in ratios)}"] if wrong_loss else []
    if wrong_gradient:
        parts.append(f"gradient × {float(actual @ exact / (exact @ exact)):.3f}, error {float((actual - exact).norm() / exact.norm()):.1%}")
    return "; ".join(parts) or "pass"


def pin(result: Result) -> dict[str, object]:
    """The losses, and for each gradient its norm, first and last entry."""
    gradients = {
        name: [float(value.norm()), float(value.flatten()[0]), float(value.flatten()[-1])] for name, value in result.gradients.items()
    }
    return {"losses": result.losses, "gradients": gradients}


def pins() -> dict[str, dict[str, Any]]:
    """The contents of the file of pins: an entry for each case and convention."""
    return {
        f"{case.name} | {convention.supervised} | {convention.trunk_state}": pin(reference(case, convention))
        for case in CASES
        for convention in CONVENTIONS
    }


def trainers_in(file: Path) -> dict[str, Trainer]:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TRAINERS


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--trainer", type=Path, metavar="FILE", help="run the trainers of this file")
    options.add_argument("--write-pins", action="store_true", help=f"write {PINS.name}")
    arguments = options.parse_args()
    if arguments.write_pins:
        entries = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in pins().items()]
        PINS.write_text("{\n" + ",\n".join(entries) + "\n}\n")
    elif arguments.trainer is None:
        print("| case | supervised | losses, state normed | losses, state unnormed |\n|---|---|---|---|")
        for case in CASES:
            for supervised in ("target", "chain"):
                cells = [reference(case, convention).losses for convention in CONVENTIONS if convention.supervised == supervised]
                print(f"| {case.name} | {supervised} | {' | '.join(', '.join(f'{loss:.6f}' for loss in cell) for cell in cells)} |")
    else:
        trainers = trainers_in(arguments.trainer)
        print(f"| case | {' | '.join(trainers)} |\n|{'---|' * (len(trainers) + 1)}")
        failed = False
        for case in CASES:
            verdicts = [verdict(trainer.run(case), reference(case, trainer.convention)) for trainer in trainers.values()]
            failed |= any(case_verdict != "pass" for case_verdict in verdicts)
            print(f"| {case.name} | {' | '.join(verdicts)} |", flush=True)
        sys.exit(FAILED if failed else 0)


if __name__ == "__main__":
    main()
