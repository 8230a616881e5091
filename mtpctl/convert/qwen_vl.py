"""The language model inside Qwen3.5's wrappers for images, as Megatron-Bridge's text bridges know it by itself.

Upstream's own bridges of these wrappers build the vision tower as well; here it stays in the folder that it came in.
"""

from __future__ import annotations

import importlib
from copy import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol

from mtpctl.convert.upstream import ParamMapping, Pretrained

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

PREFIX = "model.language_model."


class _TextConfig(Protocol):
    tie_word_embeddings: bool


class _WrapperConfig(Protocol):
    tie_word_embeddings: bool
    text_config: _TextConfig


def of_the_text_model(upstream: type) -> type:
    """The bridge of a wrapper, derived from the bridge of its text model."""
    stored_packed = importlib.import_module("megatron.bridge.models.conversion.utils").moe_experts_stored_packed

    class WrapperBridge(upstream):  # type: ignore[misc]
        def provider_bridge(self, hf_pretrained: Pretrained[_WrapperConfig]) -> TransformerConfig:
            text = copy(hf_pretrained.config.text_config)
            text.tie_word_embeddings = hf_pretrained.config.tie_word_embeddings
            return super().provider_bridge(SimpleNamespace(config=text))

        def _get_dense_lm_mappings(self, **options: object) -> list[ParamMapping]:
            return super()._get_dense_lm_mappings(**options, hf_prefix=PREFIX)

        def _get_moe_lm_mappings(self, **options: object) -> list[ParamMapping]:
            options["experts_packed"] = stored_packed(getattr(self, "hf_pretrained", None), f"{PREFIX}layers.")
            return super()._get_moe_lm_mappings(**options, hf_prefix=PREFIX)

    return WrapperBridge
