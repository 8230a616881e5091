"""Registers `model_type: "mimo"` with transformers, so that vLLM and Megatron-Bridge read published MiMo folders.

transformers has no such model type, and the published folder contains its configuration class as custom code, which we do not run. MiMo is
Qwen2 with additional MTP layers, so a Qwen2 configuration under that name is sufficient. vLLM selects the model by `architectures`, and
speculates with the MTP layers if the method is `mtp`.
"""

from __future__ import annotations

from mtpctl.compat.transformers_import import import_transformers

MODEL_TYPE = "mimo"


def install() -> bool:
    """Register the configuration class. Returns False, without a change, if one is already registered."""
    import_transformers()
    from transformers import AutoConfig, Qwen2Config
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if MODEL_TYPE in CONFIG_MAPPING:
        return False

    class MiMoConfig(Qwen2Config):
        model_type = MODEL_TYPE

    AutoConfig.register(MODEL_TYPE, MiMoConfig)
    return True
