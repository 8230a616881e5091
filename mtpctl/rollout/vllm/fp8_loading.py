"""FP8 engines from an unquantized model folder: vLLM's config, and a loader that quantizes the weights (vLLM 0.32.0).

No FP8 copy of the folder is written. The loader uses the quantizer of weight syncs and of `convert-hf --dtype fp8`, so a new engine has the
same values and scales as one that is updated to the same weights, or one that loads the exported folder.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mtpctl.errors import UserError
from mtpctl.families.quantization import fp8_config, select_fp8_names
from mtpctl.families.reading import DRAFTER, shape_of
from mtpctl.families.tensors import section_of, tensor_shapes
from mtpctl.recipe.model import DTYPES, read_config, tensor_names
from mtpctl.recipe.numerics import QUANTIZED_FOLDER, missing_matrix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from transformers import PretrainedConfig
    from vllm.config import ModelConfig
    from vllm.config.load import LoadConfig

LOAD_FORMAT = "mtpctl_fp8"
"""Name of the loader in vLLM (`load_format`)."""
DRAFTER_QUANTIZED = "drafter"
PRECISION = "precision"
FOLDER = "folder"
"""Keys of `model_loader_extra_config`.

DRAFTER_QUANTIZED: whether MTP layers are quantized too. PRECISION: the trainer's precision. FOLDER: the model's folder.
"""


@cache
def find_quantized_names(folder: Path, *, drafter: bool) -> frozenset[str]:
    """Names of the matrices of a model folder to quantize. `drafter`: also those of MTP layers, if the folder stores these layers.

    Raises UserError if the folder is quantized, if there are no such matrices, or if the folder stores one of them under another name.
    """
    config = read_config(folder)
    if config.get("quantization_config"):
        raise UserError(f"{folder}: {QUANTIZED_FOLDER}")
    shape, stored_names = shape_of(config), tensor_names(folder)
    names = select_fp8_names(shape, mtp=drafter and any(section_of(name, shape) == "draft" for name in stored_names))
    if not names:
        raise UserError(f"rollout.quantization: no matrix of {folder} fits blocks of 128 x 128; set rollout.quantization: none")
    if (reason := missing_matrix(folder, stored_names, names)) is not None:
        raise UserError(reason)
    return names


def with_fp8(config: PretrainedConfig, *, folder: str, drafter: bool) -> PretrainedConfig:
    """vLLM's `hf_overrides`: the config of the folder, as if its matrices were stored in FP8.

    vLLM also calls this function for the config of a drafter. A drafter in the subfolder `drafter/` is not quantized.
    """
    path = Path(folder)
    if Path(str(config.name_or_path)) != path / DRAFTER:
        shape, names = shape_of(read_config(path)), find_quantized_names(path, drafter=drafter)
        known_shapes = tensor_shapes(shape)
        other_modules = sorted(  # outside the language model, such as a vision tower
            name.removesuffix(".weight") for name in tensor_names(path) if name.endswith(".weight") and name not in known_shapes
        )
        config.quantization_config = fp8_config(shape, names, other_modules)
    return config


def register_loader() -> None:
    """Register the loader with vLLM. May be called again."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    if LOAD_FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(LOAD_FORMAT)(_loader())


def _loader() -> type:
    from dataclasses import replace

    import torch
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.platforms import current_platform

    from mtpctl.kernels.block_fp8 import quantized_tensors

    class QuantizingLoader(DefaultModelLoader):
        """Quantizes the matrices of an unquantized folder while it is read, on the engine's device."""

        def __init__(self, load_config: LoadConfig) -> None:
            options = dict(load_config.model_loader_extra_config)
            self.quantize_drafter = bool(options.pop(DRAFTER_QUANTIZED))
            self.dtype: torch.dtype = getattr(torch, DTYPES[options.pop(PRECISION)])
            self.folder = Path(str(options.pop(FOLDER)))
            super().__init__(replace(load_config, load_format="auto", model_loader_extra_config=options))

        def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, Tensor]]:  # type: ignore[override]
            names = self.names(Path(model_config.model), "draft" if model_config.runner_type == "draft" else "target")
            for name, tensor in super().get_all_weights(model_config, model):
                if name not in names:
                    yield name, tensor
                    continue
                # The trainer rounds the folder's weights to its precision before it quantizes them.
                yield from quantized_tensors(name, tensor.to(current_platform.device_type).to(self.dtype))

        def names(self, folder: Path, section: str) -> set[str]:
            """The matrices to quantize in `section`. Target and drafter both read the whole folder, and ignore each other's matrices."""
            if folder == self.folder / DRAFTER:
                return set()
            shape = shape_of(read_config(folder))
            return {name for name in find_quantized_names(folder, drafter=self.quantize_drafter) if section_of(name, shape) == section}

    return QuantizingLoader
