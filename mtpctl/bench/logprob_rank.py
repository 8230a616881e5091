"""A log-prob rank that can also be asked for the engine's bare pass, on the same weights and in the same process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mtpctl import families
from mtpctl.engine import MegatronEngine, Sequence
from mtpctl.kernels import LogProbOut
from mtpctl.logprob import ScoreRank
from mtpctl.plan import TensorSpec
from mtpctl.sync import Manifest, Publisher, VersionStore

GIB = 1 << 30


class _Metered(MegatronEngine):
    """Notes the most memory that taking log-probs from hidden states needed beyond what was there before."""

    logits_bytes = 0

    def _logprob(self, *args: Any, **options: Any) -> LogProbOut:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = super()._logprob(*args, **options)
        torch.cuda.synchronize()
        self.logits_bytes = max(self.logits_bytes, torch.cuda.max_memory_allocated() - before)
        return out


class BenchRank(ScoreRank):
    """`ScoreRank` with what it is measured against."""

    def bare(self, sequences: list[list[int]], prompt_lengths: list[int]) -> float:
        """Seconds of one `MegatronEngine.score` over all of them: packing, passes with fused log-probs and entropy, lists of numbers."""
        listed = [Sequence(ids, start, [1] * (len(ids) - start)) for ids, start in zip(sequences, prompt_lengths, strict=True)]
        self._wait()
        began = time.perf_counter()
        self.engine.score(listed)
        self._wait()
        return time.perf_counter() - began

    def logits_gib(self, sequences: list[list[int]], prompt_lengths: list[int]) -> float | None:
        """GiB that log-probs and entropy of these sequences take beyond the hidden states. None on a CPU, which keeps no count."""
        if self.engine.device.type != "cuda":
            return None
        kind, self.engine.__class__ = self.engine.__class__, _Metered
        self.bare(sequences, prompt_lengths)
        found = self.engine.logits_bytes / GIB
        self.engine.__class__ = kind
        return found

    def publish(self, root: str, version: int, bucket_bytes: int, sharper: float) -> tuple[Manifest, float]:
        """This rank's weights as a version in the store at `root`, with logits `sharper` times as large. Also the seconds it took."""
        shape = self.engine.folder.shape
        last = f"{shape.prefix}norm.weight"
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[self.config.precision]
        publisher = Publisher(VersionStore(Path(root)), bucket_bytes=bucket_bytes, section_of=self._section_of)
        publisher.plan((TensorSpec(name, tuple(size), dtype) for name, size in self.tensors.items()), families.aliases(shape))

        def export() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.engine.export():
                if name in self.tensors:
                    yield name, tensor * sharper if name == last else tensor

        began = time.perf_counter()
        manifest = publisher.publish(export(), version)
        return manifest, time.perf_counter() - began

    def start_memory(self) -> None:
        """Start counting memory anew."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._allocated = torch.cuda.memory_allocated()

    def more_memory_gib(self) -> float | None:
        """GiB beyond what was allocated at `start_memory`, at the most."""
        return (torch.cuda.max_memory_allocated() - self._allocated) / GIB if self.engine.device.type == "cuda" else None

    def weights_gib(self) -> float:
        """GiB of the model's parameters."""
        return sum(p.numel() * p.element_size() for p in self.engine.module.parameters()) / GIB

    def _wait(self) -> None:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
