"""The one mapping between Hugging Face names and Megatron's: Megatron-Bridge, loading and exporting.

Checkpoint conversion, the trainer's start and its weight sync all stream through `WeightBridge`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor

from mtpctl.compat import mimo_config
from mtpctl.compat.megatron_bridge import import_auto_bridge
from mtpctl.convert import mappings
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.mappings import ConversionTask, LocalTask, ModelBridge, is_local, names_of
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.errors import UserError
from mtpctl.families.tensors import aliases, section_of, tensor_shapes
from mtpctl.model.lora import Adapter

if TYPE_CHECKING:
    from transformers import PretrainedConfig

AutoBridge = import_auto_bridge()
mappings.register()


class WeightBridge:
    """Names and tensors of one model between a Hugging Face folder and Megatron modules."""

    def __init__(self, folder: HfFolder) -> None:
        mimo_config.install()
        self.folder = folder
        self._bridge = AutoBridge.from_hf_config(_hf_config(folder))
        self._known: tuple[tuple[int, ...], list[ConversionTask]] | None = None
        self._section_of = cache(partial(section_of, shape=folder.shape))

    def config(self) -> TransformerConfig:
        """A new Megatron config with this model's sizes, for the caller to complete and finalize."""
        config = self._bridge.to_megatron_provider(load_weights=False)
        config.vocab_size = self.folder.shape.vocab
        config.share_embeddings_and_output_weights = self.folder.shape.tied
        return config

    def mapping(self) -> ModelBridge:
        """Megatron-Bridge's own bridge, for one pass over a model."""
        return self._bridge._model_bridge

    def pretrained(self, names: Collection[str], weights: Mapping[str, Tensor] | None = None, path: Path | None = None) -> SimpleNamespace:
        """The stand-in for a Hugging Face model that Megatron-Bridge is given: config, names of tensors, and values where it reads them."""
        state = _State(names, weights or {})
        return SimpleNamespace(config=self._bridge.hf_pretrained, state=state, model_name_or_path=str(path or self.folder.path))

    def load(self, chunks: list[MegatronModule], path: Path | None = None) -> None:
        """Fill the modules from the weights of the folder, or of another folder of the same model, whatever names and layout it has.

        MTP layers are read where the modules have them. Raises UserError naming what the folder lacks, or where it is another model's.
        """
        self.fill(chunks, ModelWeights(path or self.folder.path, mtp=bool(chunks[0].config.mtp_num_layers)))

    def fill(self, chunks: list[MegatronModule], weights: ModelWeights) -> None:
        """Fill the modules from weights that are open; each rank reads those of its own parameters, one parameter at a time."""
        self._check_same(weights)
        before = {name: tensor._version for name, tensor in self._filled(chunks)}
        bridge = self.mapping()
        build = bridge.build_conversion_tasks
        # Its loop would fail on a parameter that it cannot map, None among its tasks, without naming the parameter.
        bridge.build_conversion_tasks = lambda *given: [task for task in build(*given) if task is not None]
        bridge.load_weights_hf_to_megatron(self.pretrained(weights, weights, weights.folder.path), chunks)
        # Tensors count the writes to them. A parameter that the bridge could not map, which it only logs, has none.
        left = [name for name, tensor in self._filled(chunks) if tensor._version == before[name]]
        if left:
            more = f" and {len(left) - 8} more" if len(left) > 8 else ""
            raise RuntimeError(f"parameters of {self.folder.shape.architecture} that were not filled: {', '.join(left[:8])}{more}")

    def _filled(self, chunks: list[MegatronModule]) -> Iterator[tuple[str, Tensor]]:
        """What `fill` must write on this rank: parameters and stored buffers, but no adapters and no copy of a tied embedding."""
        for number, chunk in enumerate(chunks):
            at = f"{number}." if len(chunks) > 1 else ""
            for path, module in chunk.named_modules():
                buffers = ((name, buffer) for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set)
                for name, tensor in (*module._parameters.items(), *buffers):
                    full = f"{path}.{name}" if path else name
                    copied = self.folder.shape.tied and "output_layer" in full
                    if tensor is not None and ".adapter." not in full and not copied:
                        yield at + full, tensor

    def _check_same(self, weights: ModelWeights) -> None:
        """Raise UserError where these weights are another model's."""
        here, there = self.folder.shape, weights.shape
        if here.family != there.family:
            raise UserError(f"{weights.folder.path}: holds a {there.family} ({there.architecture}), the model here is a {here.family}")
        wanted = tensor_shapes(here)
        for name in weights:
            if weights.size(name) != wanted.get(name):
                made = f"makes it {list(wanted[name])}" if name in wanted else "has no place for it"
                raise UserError(f"{weights.folder.path}: holds {name} as {list(weights.size(name))}, the model here {made}")

    @cached_property
    def _stored(self) -> SimpleNamespace:
        return self.pretrained(tensor_shapes(self.folder.shape))

    def tasks(self, chunks: list[MegatronModule]) -> list[ConversionTask]:
        """The conversion of each parameter of the whole model, in the same order on every rank.

        The tasks are built once and kept, since matching names takes longer than converting weights.
        """
        parameters = tuple(id(parameter) for chunk in chunks for parameter in chunk.parameters())
        if self._known is None or self._known[0] != parameters:
            found = self.mapping().build_conversion_tasks(self._stored, chunks)
            self._known = parameters, [task for task in found if task is not None]
        return self._known[1]

    def export(
        self,
        chunks: list[MegatronModule],
        *,
        sections: Collection[str] = ("target", "draft"),
        merged: bool = True,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) one by one; every rank must iterate, and every rank gets all of them.

        sections: the trunk's tensors (`target`), the MTP layers' (`draft`) or both. Adapters are merged unless `merged` is false. Copies
        that a folder stores (DeepSeek's MTP layers have embedding and head) follow their original.
        """
        shape = self.folder.shape
        copies: dict[str, list[str]] = {}
        same = aliases(shape)
        stored = tensor_shapes(shape) if same and chunks[0].config.mtp_num_layers else {}
        for name, original in same.items():
            if name in stored:
                copies.setdefault(original, []).append(name)

        def wanted(name: str) -> bool:
            return self._section_of(name) in sections

        tasks = [
            task for task in self.tasks(chunks) if any(wanted(name) or any(map(wanted, copies.get(name, []))) for name in names_of(task))
        ]
        conversions = map(_merged, tasks) if merged else tasks
        # Without this flag the bridge would search the whole model for its own kind of adapter each time.
        stream = self.mapping().stream_weights_megatron_to_hf(
            chunks, self._stored, cpu=False, show_progress=False, conversion_tasks=conversions, merge_adapter_weights=False
        )
        for name, tensor in stream:
            if name in (f"{shape.prefix}embed_tokens.weight", "lm_head.weight"):
                tensor = tensor[: shape.vocab]  # without the rows that made the vocabulary divide over tp
            for found in (name, *copies.get(name, [])):
                if wanted(found):
                    yield found, tensor


class _Names:
    """The names of a folder's tensors, as the bridge asks for them."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = set(names)

    def get_all_keys(self) -> set[str]:
        return self.names

    def has_glob(self, pattern: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in self.names)


class _State(Mapping[str, Tensor]):
    """Names and tensors as the bridge asks a folder for them."""

    def __init__(self, names: Collection[str], weights: Mapping[str, Tensor]) -> None:
        self.source = _Names(names)
        self.weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def _hf_config(folder: HfFolder) -> PretrainedConfig:
    """transformers' own config of the folder's fields; code that the folder may bring is not run."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(folder.config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise UserError(f"{folder.path / 'config.json'}: model_type {kind!r} is none that transformers knows; it is that of the family")
    # A copy, since transformers completes the sections of what it is given.
    return CONFIG_MAPPING[kind].from_dict(deepcopy(folder.config))


def _merged(task: ConversionTask) -> ConversionTask:
    """The task with its adapter, if any, merged into its weight."""
    adapter = getattr(task.megatron_module, "adapter", None)
    if isinstance(adapter, Adapter) and is_local(task) and task.param_name.endswith(".weight"):
        return replace(task, param_weight=adapter.merged(task.param_weight))
    return task


# Hugging Face tensors that arrive one by one, into Megatron modules, through the one mapping.
#
# A Megatron parameter may be made of several tensors (q, k and v are interleaved in one). Each is held until the last one of its parameter
# arrives. The parameter is then converted, split over the tensor-parallel ranks and copied, and its tensors are released, so that memory
# beside the transport's own holds only the tensors of unfinished parameters.

Destination = Callable[[Tensor], Tensor]
"""From a parameter to the tensor that its new value is written to: itself, or a copy that takes its place later."""


class StreamMap:
    """Which tensors make which parameters of these modules. All ranks build it together.

    names: of all tensors that the model's Hugging Face folder may hold.
    """

    def __init__(self, bridge: WeightBridge, chunks: list[torch.nn.Module], names: Collection[str]) -> None:
        self.bridge, self.chunks = bridge.mapping(), chunks
        tasks = [task for task in self.bridge.build_conversion_tasks(bridge.pretrained(names), chunks) if task is not None]
        self.tasks = [task for task in tasks if is_local(task)]
        self.known = {name for task in tasks for name in names_of(task)}
        """Names of the tensors that some rank needs."""


class WeightStream:
    """One section of one weight update: `add` each of its tensors once, then `finish`. All ranks do so in the same order."""

    def __init__(self, stream_map: StreamMap, names: Collection[str], destination: Destination) -> None:
        self.map = stream_map
        self.destination = destination
        self.waiting = [task for task in stream_map.tasks if set(names_of(task)) <= set(names)]
        self.uses = Counter(name for task in self.waiting for name in names_of(task))
        self.held: dict[str, Tensor] = {}
        self.applied = 0

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        """Add a whole tensor, and apply the parameters that it completes. It may be a view of memory that is valid until `settle`."""
        if not self.uses[name]:
            return
        self.held[name] = tensor
        for task in [task for task in self.waiting if name in names_of(task) and all(n in self.held for n in names_of(task))]:
            self._apply(task)
            self.waiting.remove(task)
        # A tensor is released when every parameter that needs it is applied.
        self.held = {kept: value for kept, value in self.held.items() if self.uses[kept]}

    def settle(self) -> None:
        """Copy the tensors that are still held, so that the caller can reuse the memory they came in."""
        self.held = {name: tensor.clone() for name, tensor in self.held.items()}

    def finish(self) -> None:
        """End the section: update the copies of embeddings on other pipeline stages. Raises ValueError naming tensors that are missing."""
        if self.waiting:
            missing = sorted({name for task in self.waiting for name in names_of(task) if name not in self.held})
            raise ValueError(f"the update ended without {', '.join(missing[:8])}")
        self.map.bridge._broadcast_shared_embeddings(self.map.chunks)

    def _apply(self, task: LocalTask) -> None:
        weights = self.map.bridge.maybe_modify_loaded_hf_weight(task.mapping.hf_param, self.held)
        converted = task.mapping.hf_to_megatron(weights, task.megatron_module)
        if converted is not None:
            self.destination(task.param_weight).copy_(converted)
            self.applied += 1
        for name in names_of(task):
            self.uses[name] -= 1
