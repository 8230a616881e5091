"""The one mapping between Hugging Face names and Megatron's: Megatron-Bridge, loading and exporting.

Checkpoint conversion, the trainer's start and its weight sync all stream through `WeightBridge`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor

from mtpctl import families
from mtpctl.compat import vllm_mimo
from mtpctl.compat.transformer_engine import import_auto_bridge
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.recipe import UserError

AutoBridge = import_auto_bridge()


class WeightBridge:
    """Names and tensors of one model between a Hugging Face folder and Megatron modules."""

    def __init__(self, folder: HfFolder) -> None:
        vllm_mimo.install()
        self.folder = folder
        self._bridge = AutoBridge.from_hf_pretrained(folder.path)

    def config(self) -> TransformerConfig:
        """A new Megatron config with this model's sizes, for the caller to complete and finalize."""
        config = self._bridge.to_megatron_provider(load_weights=False)
        config.vocab_size = self.folder.shape.vocab
        config.share_embeddings_and_output_weights = self.folder.shape.tied
        return config

    def load(self, chunks: list[torch.nn.Module], path: str | Path | None = None) -> None:
        """Fill the modules from the folder's weights. Raises UserError naming what the folder lacks."""
        missing = _Missing()
        logger = logging.getLogger("megatron.bridge.models.conversion.model_bridge")
        logger.addHandler(missing)
        try:
            self._bridge.load_hf_weights(chunks, hf_path=path)
        except ValueError as error:
            raise UserError(f"model.path: {self.folder.path} does not fit its own config: {' '.join(str(error).split())}") from error
        finally:
            logger.removeHandler(missing)
        if missing.names:
            raise UserError(f"model.path: {self.folder.path} lacks {'; '.join(missing.names[:8])}")

    def export(self, chunks: list[MegatronModule], *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) one by one; every rank must iterate, and every rank gets all of them.

        Copies that a folder keeps beside their original (DeepSeek's MTP layers bring embedding and head) follow it.
        """
        shape = self.folder.shape
        stored = families.tensors(shape) if chunks[0].config.mtp_num_layers else {}
        copies: dict[str, list[str]] = {}
        for name, original in families.aliases(shape).items():
            if name in stored:
                copies.setdefault(original, []).append(name)
        for name, tensor in self._bridge.export_hf_weights(chunks, cpu=False, show_progress=False, weight_dtype=dtype):
            yield name, tensor
            for copy in copies.get(name, []):
                yield copy, tensor


class _Missing(logging.Handler):
    """Collects the bridge's warnings on tensors that it could not find or map: here they are errors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "find" in text or "No mapping" in text:
            self.names.append(text.removeprefix("WARNING: "))
