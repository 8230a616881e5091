"""A model in one process without weights: its parameters, and their names and shapes in checkpoints and Hugging Face folders.

It uses almost no memory for a model of any size, because the operating system allocates no memory for pages that are never written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch import Tensor

from mtpctl.convert.bridge import StreamMap, WeightBridge
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.mappings import LocalTask, names_of, packs_experts
from mtpctl.errors import UserError
from mtpctl.families.tensors import aliases, tensor_shapes
from mtpctl.model.build import build_model, complete_config
from mtpctl.model.lora import attach_adapters
from mtpctl.model.parallel import ProcessGroups, Rank
from mtpctl.recipe.model import MtpConfig
from mtpctl.recipe.section import ParallelConfig
from mtpctl.recipe.train import LoraConfig

_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Parameter:
    """A Megatron parameter. needs: names of the model's tensors of which it consists."""

    name: str
    shape: tuple[int, ...]
    needs: tuple[str, ...]
    task: LocalTask


class Skeleton:
    """The model of a folder's config, with MTP layers if `mtp` is set, and with adapters if `lora` is given.

    It uses the same mapping as the trainer. It creates process groups, so it must be closed after use.
    """

    def __init__(self, folder: HfFolder, *, mtp: bool, precision: str = "bf16", lora: LoraConfig | None = None) -> None:
        self.shape = shape = folder.shape
        self.groups = ProcessGroups(Rank(), ParallelConfig())
        try:
            self.bridge, config = WeightBridge(folder), MtpConfig(mode="load" if mtp else "off")
            transformer = complete_config(self.bridge.config(), shape, parallel=ParallelConfig(), precision=precision, mtp=config)
            self.model = build_model(transformer, shape, config)
            if lora is not None:
                attach_adapters(self.model, lora, seed=0)
            self._state = self.model.sharded_state_dict()
            self._map = StreamMap(self.bridge, [self.model], {*tensor_shapes(shape), *aliases(shape)})
            self._check_mapped()
        except BaseException:
            self.groups.close()
            raise
        self.parameters = {
            task.param_name: Parameter(task.param_name, tuple(task.param_weight.shape), _needs(task), task) for task in self._map.tasks
        }
        self.objects = [value for value in self._state.values() if isinstance(value, ShardedObject)]
        """The objects that checkpoints store in addition to tensors."""

    def _check_mapped(self) -> None:
        """Raise UserError if a parameter has no tensor in the mapping."""
        mapped = {task.param_name for task in self._map.tasks}
        missing = [name for name, _ in self.model.named_parameters() if name not in mapped and ".adapter." not in name]
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise UserError(
                f"{self.bridge.folder.path}: no tensor is known for {', '.join(missing[:4])}{more}; such a model cannot be converted"
            )

    def pieces(self, name: str, value: Tensor) -> Iterator[ShardedTensor]:
        """The sharded tensors that a checkpoint stores for the parameter, with `value` as their data."""
        sharded = self._state[name]
        if isinstance(sharded, ShardedTensorFactory):
            yield from _built(replace(sharded, data=value))
        else:
            yield replace(sharded, data=value, dtype=value.dtype)

    def saved_as(self) -> Iterator[tuple[str, str]]:
        """Every name of the state, adapters included, with (the first) key under which a checkpoint stores it."""
        for name, sharded in self._state.items():
            if isinstance(sharded, ShardedTensorFactory):
                yield name, next(_built(sharded)).key
            elif isinstance(sharded, ShardedTensor):
                yield name, sharded.key

    def to_megatron(self, name: str, weights: Mapping[str, Tensor]) -> Tensor:
        """Convert the tensors in `weights` to the value of a parameter."""
        parameter = self.parameters[name]
        mapping = parameter.task.mapping
        if packs_experts(parameter.task):
            # The mapping expects a packed tensor, but also accepts the matrix of a single expert.
            source: Tensor | dict[str, Tensor] = torch.cat([weights[each] for each in parameter.needs])
        else:
            source = self._map.bridge.maybe_modify_loaded_hf_weight(mapping.hf_param, weights)
        value = mapping.hf_to_megatron(source, parameter.task.megatron_module)
        assert tuple(value.shape) == parameter.shape, f"{name}: {tuple(value.shape)} converted, {parameter.shape} expected"
        return value

    @torch.no_grad()
    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Load all parameters except adapters from `weights`."""
        for name, parameter in self.parameters.items():
            parameter.task.param_weight.copy_(self.to_megatron(name, weights))

    def to_hf(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """Convert the value of a parameter to the model's tensors, without the rows that pad the vocabulary."""
        parameter = self.parameters[name]
        tensors = parameter.task.mapping.megatron_to_hf(value, parameter.task.megatron_module)
        if packs_experts(parameter.task):
            (whole,) = tensors.values()
            tensors = dict(zip(parameter.needs, whole.chunk(len(parameter.needs)), strict=True))
        else:
            tensors = dict(self._map.bridge.maybe_modify_converted_hf_weight(parameter.task, tensors, {}))
        embeddings = (self.shape.embedding_name, "lm_head.weight")
        return {name: tensor[: self.shape.vocab] if name in embeddings else tensor for name, tensor in tensors.items()}

    def close(self) -> None:
        self.groups.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _built(factory: ShardedTensorFactory) -> Iterator[ShardedTensor]:
    return (piece for piece in nested_values({"": factory.build()}) if isinstance(piece, ShardedTensor))


def _needs(task: LocalTask) -> tuple[str, ...]:
    if not packs_experts(task):
        return names_of(task)
    expert = _EXPERT.search(task.param_name)
    assert expert is not None, f"{task.param_name} is packed and no expert"
    prefix, _, kind = names_of(task)[0].rpartition(".")
    parts = ("gate", "up") if kind == "gate_up_proj" else ("down",)
    return tuple(f"{prefix}.{expert[1]}.{part}_proj.weight" for part in parts)
