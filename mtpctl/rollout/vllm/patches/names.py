"""What a live vLLM model calls the tensors of a Hugging Face folder (vLLM 0.32.0).

Most models say it as data, `hf_to_vllm_mapper`. The drafters of DeepSeek-V3 and GLM-4.5 have no such map: their `load_weights`
renames layer by layer, with a method that puts the transformer layer inside under `mtp_block` and the embedding on top.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtpctl.rollout.vllm.patches.version import require_pinned


def renamer(model: Any) -> Callable[[str], str | None] | None:
    """From a folder's name to the live model's own, before anything is packed; None where the model renames nothing.

    Raises UpstreamMoved for another release.
    """
    require_pinned(__name__)
    if (mapper := getattr(model, "hf_to_vllm_mapper", None)) is not None:
        found: Callable[[str], str | None] = mapper.get_rename_mapper().map_name
        return found
    if not hasattr(model, "_rewrite_spec_layer_name"):
        return None
    from vllm.model_executor.models.utils import get_spec_layer_idx_from_weight_name

    def rename(name: str) -> str | None:
        layer = get_spec_layer_idx_from_weight_name(model.config, name)
        renamed: str | None = None if layer is None else model._rewrite_spec_layer_name(layer, name)
        return renamed

    return rename
