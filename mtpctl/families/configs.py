"""Configs of some hub models and of a toy model, so that plans and models with random weights need no download.

`hub_configs.json` maps hub ids to the fields of config.json, or to the id of another model with the same fields. MiMo-V2-Flash's sizes are
from the unit tests of NVIDIA-NeMo/Megatron-Bridge, and its layer patterns are the defaults of transformers. Its published config does not
state the three MTP layers.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

from mtpctl.errors import UserError


def _read_configs() -> dict[str, dict[str, object]]:
    entries = json.loads(Path(__file__).with_name("hub_configs.json").read_text())
    return {hub_id: entries[entry] if isinstance(entry, str) else entry for hub_id, entry in entries.items()}


HUB_CONFIGS = _read_configs()


def hub_config(hub_id: str) -> dict[str, object]:
    """The config.json fields of a hub model. Raises UserError for a model that is not in `HUB_CONFIGS`."""
    if hub_id not in HUB_CONFIGS:
        raise UserError(f"the sizes of {hub_id} are not known without a download; known are {', '.join(HUB_CONFIGS)}")
    return deepcopy(HUB_CONFIGS[hub_id])


_TOY_CONFIG: dict[str, object] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 640000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def toy_config(**changes: object) -> dict[str, object]:
    """The config.json fields of a MiMo model with two layers and one MTP layer, updated with `changes` (such as vocabulary and context).

    With this `model_type`, vLLM reads the config without `mtpctl.compat.transformers.register_mimo`.
    """
    return {**_TOY_CONFIG, **changes}
