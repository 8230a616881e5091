"""Where the routes of experts stay while their response is generated: at the slots that its tokens have in the KV cache (vLLM 0.32.0).

Rows of what a prompt has in the prefix cache are there already, and those of rejected drafts are written over. `routes` puts a recorder
into each worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mtpctl.errors import UpstreamMoved
from mtpctl.routes import Routes

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch

Span = tuple[list[int], int, int]
"""Blocks, from the one that holds the first token wanted on, and the positions of that token and of the one behind the last."""


def group_of(config: KVCacheConfig) -> int:
    """The KV cache's first group of layers that attend to every token, whose blocks are kept while their request lives.

    Raises UpstreamMoved where there is none.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    for number, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec, FullAttentionSpec):
            return number
    raise UpstreamMoved(f"{__name__}: no layer attends to every token, and routes have no slots to stay in")


class SlotRecorder:
    """In the place of vLLM's connector in a worker: rows by slot. The first tensor-parallel rank has them; the others only take part."""

    def __init__(self, *, vllm_config: VllmConfig, model: torch.nn.Module, kv_cache_config: KVCacheConfig) -> None:
        import torch
        from vllm.distributed.parallel_state import get_tp_group
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer, bind_routed_experts_capturer

        self._capturer = RoutedExpertsCapturer(vllm_config.scheduler_config.max_num_batched_tokens, vllm_config)
        bind_routed_experts_capturer(model, self._capturer)
        self.group = group_of(kv_cache_config)
        """The group of layers whose slots rows have."""
        self._block = kv_cache_config.kv_cache_groups[self.group].kv_cache_spec.block_size
        self._shape, self._dtype = self._capturer.shape_per_token, np.dtype(self._capturer.output_dtype_name)
        self._rows: torch.Tensor | None = None
        self._step = False
        self.slots: torch.Tensor | None = None
        """Of the second model runner: the slot of each token of a step, by group of layers."""
        if get_tp_group().is_first_rank:
            width, device = int(np.prod(self._shape)), self._capturer.device_buffer.device
            # Torch can hardly do anything with unsigned numbers of two bytes. Numbers of experts fit into signed ones.
            self._rows = torch.empty((kv_cache_config.num_blocks * self._block, width), dtype=_signed(self._dtype), device=device)
            self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def begin_step(self, metadata: AuxOutputConnectorMetadata | None) -> None:
        """The second model runner has a step with requests before it, and not one that only warms up."""
        self._step = True

    def prepare_output(self, input_batch: InputBatch) -> None:
        """The second model runner has launched a step."""
        if not self._step:
            return
        self._step = False
        assert self.slots is not None, "set with the KV cache"
        self.write(self.slots[self.group, : int(input_batch.query_start_loc_np[len(input_batch.req_ids)])])

    def write(self, slots: torch.Tensor) -> None:
        """Write the rows of the step that was just launched to the slots of its tokens [tokens]."""
        if self._rows is not None:
            rows = self._capturer.device_buffer[: len(slots)].flatten(1).to(self._rows.dtype)
            self._rows.index_copy_(0, slots, rows)

    def fetch(self, spans: Sequence[Span], under_way: bool) -> Routes | None:
        """The rows of these spans, one after the other [tokens, layers, experts a token]; None on a rank that has none.

        With `under_way` it waits for the steps that were launched: some of the rows may be theirs.
        """
        import torch

        if self._rows is None:
            return None
        slots = torch.from_numpy(np.concatenate([slots_of(*span, self._block) for span in spans]))
        if self._stream is None:
            rows = self._rows[slots]
        else:
            if under_way:
                torch.cuda.synchronize(self._rows.device)
            with torch.cuda.stream(self._stream):
                place = slots.pin_memory().to(self._rows.device, non_blocking=True)
                rows = self._rows.index_select(0, place).to("cpu", non_blocking=True)
                self._stream.synchronize()
        return rows.numpy().view(self._dtype).reshape(-1, *self._shape)

    def close(self) -> None:
        """Give the rows' memory back."""
        self._rows = None


def slots_of(blocks: Sequence[int], start: int, end: int, block: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The slots of positions `start` to `end`; `blocks` begins with the one of `start`, and each holds `block` tokens."""
    places = np.arange(start, end, dtype=np.int64)
    if end > start and (end - 1) // block - start // block >= len(blocks):
        raise UpstreamMoved(f"{__name__}: tokens {start} to {end} have {len(blocks)} blocks of {block}, and need more")
    return np.asarray(blocks, np.int64)[places // block - start // block] * block + places % block


def bytes_per_slot(config: VllmConfig) -> int:
    """What the rows of one token take on the card."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import _get_routed_experts_shape

    layers, experts, chosen = _get_routed_experts_shape(config)
    return int(layers * chosen * (1 if experts <= 256 else 2))


def _signed(dtype: np.dtype[Any]) -> torch.dtype:
    import torch

    return torch.uint8 if dtype.itemsize == 1 else torch.int16


def bytes_per_token(specs: Iterable[Any]) -> int:
    """Bytes that a token takes in the KV cache of layers that attend to every token."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return sum(spec.page_size_bytes // spec.block_size for spec in specs if isinstance(spec, FullAttentionSpec)) or 1
