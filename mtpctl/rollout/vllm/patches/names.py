"""The names that a live vLLM model has for the tensors of a Hugging Face folder (vLLM 0.32.0).

Most models have a map, `hf_to_vllm_mapper`. The drafters of DeepSeek-V3 and GLM-4.5 have none: their `load_weights` renames layer by
layer, with a method that puts a layer's attention and MLP under `mtp_block` and moves the embedding to the top of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from torch import nn

from mtpctl.rollout.vllm.patches.version import require_pinned

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.model_executor.models.utils import WeightsMapper


class _LayerRenaming(Protocol):
    """A drafter that renames layer by layer."""

    config: PretrainedConfig

    def _rewrite_spec_layer_name(self, spec_layer: int, name: str) -> str: ...


def renamer(model: nn.Module) -> Callable[[str], str | None] | None:
    """A function from a folder's name to the live model's, before vLLM packs anything; None where the model renames nothing.

    Raises UpstreamMoved for another release.
    """
    require_pinned(__name__)
    mapper: WeightsMapper | None = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        return mapper.get_rename_mapper().map_name
    if not hasattr(model, "_rewrite_spec_layer_name"):
        return None
    drafter = cast(_LayerRenaming, model)
    from vllm.model_executor.models.utils import get_spec_layer_idx_from_weight_name

    def rename(name: str) -> str | None:
        layer = get_spec_layer_idx_from_weight_name(drafter.config, name)
        return None if layer is None else drafter._rewrite_spec_layer_name(layer, name)

    return rename
