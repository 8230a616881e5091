"""Megatron-Bridge's classes, typed as far as they are called here. The classes themselves are imported by name, once the stand-ins
that importing Megatron-Bridge may need are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field
from typing import Any, ClassVar, Protocol, TypeGuard

import torch
from torch import Tensor

type HfNames = str | dict[str, str]
"""The Hugging Face tensor of a parameter, or several by their part (q, k, v)."""


class ParamMapping(Protocol):
    """How one Megatron parameter and its Hugging Face tensors are made from each other."""

    megatron_param: str
    hf_param: HfNames

    def hf_to_megatron(self, hf_weights: Tensor | Mapping[str, Tensor], megatron_module: torch.nn.Module) -> Tensor: ...

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: torch.nn.Module | None) -> dict[str, Tensor]: ...

    def clear_broadcast_cache(self) -> None: ...

    def clear_tensor_spec_output_cache(self) -> None: ...


class ConversionTask(Protocol):
    """One parameter of the whole model, a frozen dataclass. Module and weight are None on ranks of other pipeline stages."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    param_name: str
    global_param_name: str
    mapping: ParamMapping
    megatron_module: torch.nn.Module | None
    param_weight: Tensor | None


class ModelBridge(Protocol):
    """The conversion of one model architecture."""

    build_conversion_tasks: Callable[..., list[ConversionTask | None]]

    def load_weights_hf_to_megatron(self, hf_pretrained: object, megatron_model: list[torch.nn.Module]) -> object: ...

    def stream_weights_megatron_to_hf(
        self, megatron_model: list[torch.nn.Module], hf_pretrained: object, **options: object
    ) -> Iterator[tuple[str, Tensor]]: ...

    def maybe_modify_loaded_hf_weight(self, hf_param: HfNames, weights: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]: ...

    def maybe_modify_converted_hf_weight(
        self, task: ConversionTask, converted: dict[str, Tensor], state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]: ...

    def _broadcast_shared_embeddings(self, megatron_model: list[torch.nn.Module]) -> None: ...


class LocalTask(ConversionTask, Protocol):
    """A task whose parameter this rank holds."""

    megatron_module: torch.nn.Module
    param_weight: Tensor


class Pretrained[Config](Protocol):
    """What Megatron-Bridge takes for a Hugging Face model, as far as its config goes."""

    config: Config


def is_local(task: ConversionTask) -> TypeGuard[LocalTask]:
    """Whether this rank holds the task's parameter."""
    return task.megatron_module is not None


def names_of(task: ConversionTask) -> tuple[str, ...]:
    """Names of the Hugging Face tensors that a parameter is made of."""
    source = task.mapping.hf_param
    return (source,) if isinstance(source, str) else tuple(source.values())


def packs_experts(task: ConversionTask) -> bool:
    """Whether the mapping knows the experts of a layer only as one packed tensor."""
    return bool(getattr(task.mapping, "is_grouped_export", False))
