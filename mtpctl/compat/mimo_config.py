"""Let vLLM read MiMo folders as they are published: `model_type: "mimo"`.

transformers knows no such model type, and the published folder brings its configuration class as code of its own, which
we do not run. MiMo's trunk is Qwen2's with MTP layers beside it, so a Qwen2 configuration under that name is all that is
needed; vLLM picks the model by `architectures`, and turns speculation with `method: "mtp"` to the MTP layers by itself.
"""

from __future__ import annotations

MODEL_TYPE = "mimo"


def install() -> bool:
    """Register the configuration class with transformers. Returns False where one is registered already, which then stays."""
    from transformers import AutoConfig, Qwen2Config
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if MODEL_TYPE in CONFIG_MAPPING:
        return False

    class MiMoConfig(Qwen2Config):
        model_type = MODEL_TYPE

    AutoConfig.register(MODEL_TYPE, MiMoConfig)
    return True
