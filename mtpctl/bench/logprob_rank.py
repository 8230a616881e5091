"""A log-prob rank that can also be asked for the engine's bare pass, on the same weights and in the same process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mtpctl.families.tensors import aliases
from mtpctl.kernels.logprob import LogProbOut
from mtpctl.logprob.rank import ScoreRank
from mtpctl.model.build import TORCH_DTYPES
from mtpctl.plan.buckets import TensorSpec
from mtpctl.plan.memory import GIB
from mtpctl.sync.protocol import Manifest
from mtpctl.sync.sender import Publisher
from mtpctl.sync.store import VersionStore
from mtpctl.trainer.batch import Sequence
from mtpctl.trainer.head import Head

STD = 0.02
"""Standard deviation of the random weights."""


class _Metered(Head):
    """A head that records the peak of memory that log-probs of hidden states need beyond what is allocated before."""

    logits_bytes = 0

    def logprob(self, *args: Any, **options: Any) -> LogProbOut:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = super().logprob(*args, **options)
        torch.cuda.synchronize()
        self.logits_bytes = max(self.logits_bytes, torch.cuda.max_memory_allocated() - before)
        return out


class BenchRank(ScoreRank):
    """`ScoreRank` with a bare pass to compare it with, and random versions to update it to."""

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
        plain = self.engine.head
        self.engine.head = metered = _Metered(plain.kernels, plain.shape, plain.parallel, sequence_parallel=plain.sequence_parallel)
        self.bare(sequences, prompt_lengths)
        self.engine.head = plain
        return metered.logits_bytes / GIB

    def publish(self, root: str, version: int, bucket_bytes: int, sharper: float) -> tuple[Manifest, float]:
        """Publish other random weights, with logits `sharper` times as large, in the store at `root`. Returns also the seconds it took."""
        shape = self.engine.folder.shape
        dtype = TORCH_DTYPES[self.config.precision]
        generator = torch.Generator(self.engine.device).manual_seed(version)

        def drawn() -> Iterator[tuple[str, torch.Tensor]]:
            for name, size in self.tensors.items():
                tensor = torch.empty(size, dtype=dtype, device=self.engine.device)
                if tensor.ndim > 1:
                    tensor.normal_(0.0, STD, generator=generator)
                else:
                    tensor.fill_(0.0 if name.endswith("bias") else sharper if name == f"{shape.prefix}norm.weight" else 1.0)
                yield name, tensor

        publisher = Publisher(VersionStore(Path(root)), bucket_bytes=bucket_bytes, section_of=self._section_of)
        specs = (TensorSpec(name, tuple(size), str(dtype).removeprefix("torch.")) for name, size in self.tensors.items())
        publisher.plan(specs, aliases(shape))
        began = time.perf_counter()
        manifest = publisher.publish(drawn(), version)
        return manifest, time.perf_counter() - began

    def start_memory(self) -> None:
        """Reset the peak of allocated memory."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._allocated = torch.cuda.memory_allocated()

    def more_memory_gib(self) -> float | None:
        """Peak of GiB beyond what was allocated at `start_memory`; None on a CPU."""
        return (torch.cuda.max_memory_allocated() - self._allocated) / GIB if self.engine.device.type == "cuda" else None

    def weights_gib(self) -> float:
        """GiB of the model's parameters."""
        return sum(p.numel() * p.element_size() for p in self.engine.module.parameters()) / GIB

    def _wait(self) -> None:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
