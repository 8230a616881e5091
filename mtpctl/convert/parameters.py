"""Megatron's parameters one by one: which of the model's tensors make each, and the conversion both ways.

The mappings are those with which the trainer loads and exports; here a single process that holds whole tensors converts one parameter at
a time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpctl.convert.bridge import WeightBridge
from mtpctl.convert.stream import StreamMap
from mtpctl.convert.upstream import LocalTask, names_of, packs_experts
from mtpctl.errors import UserError

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
