"""A model's parameters and their places in checkpoints, without their values, in one process.

It takes almost no memory whatever the model's size, since the operating system provides none for pages that are never written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
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
from mtpctl.recipe.parallel import ParallelConfig
from mtpctl.recipe.train import LoraConfig


class Skeleton:
    """The model of a folder's config, with its MTP layers unless `mtp=False`, and with adapters where `lora` is given.

    Close it when done: it holds the process groups.
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
            state = self.model.sharded_state_dict()
            names = {*tensor_shapes(shape), *aliases(shape)}
            self.map = ParameterMap(self.bridge, self.model, names)
        except BaseException:
            self.groups.close()
            raise
        self.parameters = {parameter.name: parameter for parameter in self.map.parameters}
        self.objects = [value for value in state.values() if isinstance(value, ShardedObject)]
        """What checkpoints hold beside tensors."""
        self._state = {name: state[name] for name in self.parameters}
        self._all = state

    def place(self, name: str, value: Tensor) -> ShardedTensor | ShardedTensorFactory:
        """Where a checkpoint keeps the parameter, with `value` as its data."""
        place = self._state[name]
        if isinstance(place, ShardedTensorFactory):
            return replace(place, data=value)
        return replace(place, data=value, dtype=value.dtype)

    def pieces(self, name: str, value: Tensor) -> Iterator[ShardedTensor]:
        """The tensors by which a checkpoint keeps the parameter."""
        place = self.place(name, value)
        if isinstance(place, ShardedTensor):
            yield place
            return
        tree = {"": place.build()}
        yield from (piece for piece in nested_values(tree) if isinstance(piece, ShardedTensor))

    def saved_as(self) -> Iterator[tuple[str, str]]:
        """Every name of the state, adapters included, with a key that a checkpoint keeps it by."""
        for name, place in self._all.items():
            if isinstance(place, ShardedTensorFactory):
                tree = {"": place.build()}
                yield name, next(piece.key for piece in nested_values(tree) if isinstance(piece, ShardedTensor))
            elif isinstance(place, ShardedTensor):
                yield name, place.key

    def to_hf(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """The Hugging Face tensors that make the parameter, without rows that padded the vocabulary."""
        made = self.map.to_hf(self.parameters[name], value)
        embedding = (f"{self.shape.prefix}embed_tokens.weight", "lm_head.weight")
        return {found: tensor[: self.shape.vocab] if found in embedding else tensor for found, tensor in made.items()}

    def close(self) -> None:
        self.groups.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


# Megatron's parameters one by one: which of the model's tensors make each, and the conversion both ways.
#
# The mappings are those with which the trainer loads and exports; here a single process that holds whole tensors converts one parameter at
# a time.

_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Parameter:
    """A Megatron parameter: its name, its shape, and the names of the tensors that make it."""

    name: str
    shape: tuple[int, ...]
    needs: tuple[str, ...]
    task: LocalTask


class ParameterMap:
    """The parameters of a model that one process holds. names: of all tensors that the model's folder may hold."""

    def __init__(self, bridge: WeightBridge, model: torch.nn.Module, names: Collection[str]) -> None:
        stream = StreamMap(bridge, [model], names)
        self._bridge = stream.bridge
        mapped = {task.param_name for task in stream.tasks}
        nameless = [name for name, _ in model.named_parameters() if name not in mapped and ".adapter." not in name]
        if nameless:
            more = f" and {len(nameless) - 4} more" if len(nameless) > 4 else ""
            raise UserError(
                f"{bridge.folder.path}: no tensor is known for {', '.join(nameless[:4])}{more}; such a model cannot be converted"
            )
        self.parameters = [Parameter(task.param_name, tuple(task.param_weight.shape), _needs(task), task) for task in stream.tasks]

    def to_megatron(self, parameter: Parameter, weights: Mapping[str, Tensor]) -> Tensor:
        mapping = parameter.task.mapping
        if packs_experts(parameter.task):
            # Upstream selects an expert from the packed tensor of all; it takes a single expert's matrix as it is.
            given: Tensor | dict[str, Tensor] = torch.cat([weights[name] for name in parameter.needs])
        else:
            given = self._bridge.maybe_modify_loaded_hf_weight(mapping.hf_param, weights)
        value = mapping.hf_to_megatron(given, parameter.task.megatron_module)
        assert tuple(value.shape) == parameter.shape, f"{parameter.name}: {tuple(value.shape)} made, {parameter.shape} wanted"
        return value

    def to_hf(self, parameter: Parameter, value: Tensor) -> dict[str, Tensor]:
        """The tensors that make the parameter, by name."""
        made = parameter.task.mapping.megatron_to_hf(value, parameter.task.megatron_module)
        if packs_experts(parameter.task):
            (whole,) = made.values()
            return dict(zip(parameter.needs, whole.chunk(len(parameter.needs)), strict=True))
        return dict(self._bridge.maybe_modify_converted_hf_weight(parameter.task, made, {}))


def _needs(task: LocalTask) -> tuple[str, ...]:
    if not packs_experts(task):
        return names_of(task)
    found = _EXPERT.search(task.param_name)
    assert found is not None, f"{task.param_name} is packed and no expert"
    at, _, kind = names_of(task)[0].rpartition(".")
    parts = ("gate", "up") if kind == "gate_up_proj" else ("down",)
    return tuple(f"{at}.{found[1]}.{part}_proj.weight" for part in parts)
