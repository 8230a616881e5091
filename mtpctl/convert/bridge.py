"""The mapping between Hugging Face's and Megatron's parameters, from Megatron-Bridge.

Checkpoint conversion, the trainer's loading of weights, and weight sync use the same mapping.
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

from mtpctl.compat.megatron_bridge import import_auto_bridge
from mtpctl.compat.transformers import register_mimo
from mtpctl.convert import family_bridges, mappings
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.mappings import ConversionTask, LocalTask, ModelBridge, hf_names, is_local
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.errors import UserError
from mtpctl.families.tensors import aliases, section_of, tensor_shapes
from mtpctl.model.lora import Adapter

if TYPE_CHECKING:
    from transformers import PretrainedConfig

AutoBridge = import_auto_bridge()
family_bridges.register_bridges()


class WeightBridge:
    """Loads a Hugging Face folder into Megatron modules, and exports them under Hugging Face names."""

    def __init__(self, folder: HfFolder) -> None:
        register_mimo()
        self.folder = folder
        self._bridge = AutoBridge.from_hf_config(_transformers_config(folder))
        self._tasks: tuple[tuple[int, ...], list[ConversionTask]] | None = None
        self._section_of = cache(partial(section_of, shape=folder.shape))

    def config(self) -> TransformerConfig:
        """A Megatron config with this model's sizes. The caller completes and finalizes it."""
        config = self._bridge.to_megatron_provider(load_weights=False)
        config.vocab_size = self.folder.shape.vocab
        config.share_embeddings_and_output_weights = self.folder.shape.tied
        return config

    def mapping(self) -> ModelBridge:
        """Megatron-Bridge's bridge object, extended by the parameters of an EAGLE-3 or DFlash drafter."""
        bridge: ModelBridge = self._bridge._model_bridge
        if self.folder.shape.eagle3 is not None:
            mappings.add_eagle3(bridge)
        if self.folder.shape.dflash is not None:
            mappings.add_dflash(bridge)
        return bridge

    def pretrained(self, names: Collection[str], weights: Mapping[str, Tensor] | None = None, path: Path | None = None) -> SimpleNamespace:
        """The attributes of a Hugging Face model that Megatron-Bridge reads: config, tensor names and, if given, tensors."""
        state = _FolderState(names, weights or {})
        return SimpleNamespace(config=self._bridge.hf_pretrained, state=state, model_name_or_path=str(path or self.folder.path))

    def load(self, chunks: list[MegatronModule], path: Path | None = None) -> None:
        """Load the weights in `path` (default: the bridge's folder) into the modules, including MTP layers if the modules have them.

        Raises UserError if weights are missing or belong to another model.
        """
        self.fill(chunks, ModelWeights(path or self.folder.path, mtp=bool(chunks[0].config.mtp_num_layers)))

    def fill(self, chunks: list[MegatronModule], weights: ModelWeights) -> None:
        """Load weights from an open folder into the modules. Each rank reads only its own parameters, one at a time."""
        self._check_same_model(weights)
        versions = {name: tensor._version for name, tensor in self._required_tensors(chunks)}
        bridge = self.mapping()
        build = bridge.build_conversion_tasks
        # For a parameter without a mapping, upstream's list has None, on which its loop fails without naming the parameter.
        bridge.build_conversion_tasks = lambda *args: [task for task in build(*args) if task is not None]
        bridge.load_weights_hf_to_megatron(self.pretrained(weights, weights, weights.folder.path), chunks)
        # The bridge only logs parameters that it cannot map. `_version` counts in-place writes.
        unfilled = [name for name, tensor in self._required_tensors(chunks) if tensor._version == versions[name]]
        if unfilled:
            more = f" and {len(unfilled) - 8} more" if len(unfilled) > 8 else ""
            raise RuntimeError(f"parameters of {self.folder.shape.architecture} that were not filled: {', '.join(unfilled[:8])}{more}")

    def _required_tensors(self, chunks: list[MegatronModule]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that `fill` must write on this rank: parameters and persistent buffers, except adapters and a tied LM head."""
        for index, chunk in enumerate(chunks):
            prefix = f"{index}." if len(chunks) > 1 else ""
            for path, module in chunk.named_modules():
                buffers = ((name, buffer) for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set)
                for name, tensor in (*module._parameters.items(), *buffers):
                    full_name = f"{path}.{name}" if path else name
                    is_copy = self.folder.shape.tied and "output_layer" in full_name
                    if tensor is not None and ".adapter." not in full_name and not is_copy:
                        yield prefix + full_name, tensor

    def _check_same_model(self, weights: ModelWeights) -> None:
        """Raise UserError if the weights belong to another model."""
        expected, actual = self.folder.shape, weights.shape
        if expected.family != actual.family:
            raise UserError(
                f"{weights.folder.path}: contains a model of {actual.family} ({actual.architecture}), but {expected.family} is required"
            )
        sizes = tensor_shapes(expected)
        for name in weights:
            if weights.size(name) != sizes.get(name):
                if name not in sizes:
                    raise UserError(f"{weights.folder.path}: contains {name}, which the model does not have")
                raise UserError(
                    f"{weights.folder.path}: {name} has the shape {list(weights.size(name))}, but the model requires {list(sizes[name])}"
                )

    @cached_property
    def _stored_names(self) -> SimpleNamespace:
        return self.pretrained(tensor_shapes(self.folder.shape))

    def tasks(self, chunks: list[MegatronModule]) -> list[ConversionTask]:
        """The conversion tasks of all parameters of the model, in the same order on every rank.

        Cached, because matching names takes longer than converting weights.
        """
        parameters = tuple(id(parameter) for chunk in chunks for parameter in chunk.parameters())
        if self._tasks is None or self._tasks[0] != parameters:
            tasks = self.mapping().build_conversion_tasks(self._stored_names, chunks)
            self._tasks = parameters, [task for task in tasks if task is not None]
        return self._tasks[1]

    def export(
        self, chunks: list[MegatronModule], *, sections: Collection[str] = ("target", "draft"), merged: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor). Collective: every rank must iterate, and gets all tensors.

        The embedding and the LM head come last. With a push transport, the first buckets are packed while the engines are still pausing, so
        these should be the buckets that take longest to pack: those of layers, which consist of many tensors.

        If folders store a tensor under several names (DeepSeek's MTP layers repeat embedding and head), it is yielded once for each name.

        Args:
            chunks: the model's modules on this rank.
            sections: `target` for the trunk's tensors, `draft` for those of the MTP layers.
            merged: merge adapters into their weights.
        """
        shape = self.folder.shape
        copies: dict[str, list[str]] = {}
        alias_sources = aliases(shape)
        tensor_sizes = tensor_shapes(shape) if alias_sources and chunks[0].config.mtp_num_layers else {}
        for name, original in alias_sources.items():
            if name in tensor_sizes:
                copies.setdefault(original, []).append(name)

        def is_included(name: str) -> bool:
            return self._section_of(name) in sections

        tasks = [
            task
            for task in self.tasks(chunks)
            if any(is_included(name) or any(map(is_included, copies.get(name, []))) for name in hf_names(task))
        ]
        vocabulary_names = {shape.embedding_name, "lm_head.weight"}
        tasks.sort(key=lambda task: not vocabulary_names.isdisjoint(hf_names(task)))
        conversions = map(_merge_adapter, tasks) if merged else tasks
        # `merge_adapter_weights=False`: otherwise the bridge searches the whole model for its own kind of adapter.
        stream = self.mapping().stream_weights_megatron_to_hf(
            chunks, self._stored_names, cpu=False, show_progress=False, conversion_tasks=conversions, merge_adapter_weights=False
        )
        for name, tensor in stream:
            if name in vocabulary_names:
                tensor = tensor[: shape.vocab]  # Drops the rows that pad the vocabulary for tp.
            for stored_name in (name, *copies.get(name, [])):
                if is_included(stored_name):
                    yield stored_name, tensor


class _TensorNames:
    """The names of a folder's tensors, with the interface that the bridge expects."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = set(names)

    def get_all_keys(self) -> set[str]:
        return self.names

    def has_glob(self, pattern: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in self.names)


class _FolderState(Mapping[str, Tensor]):
    """Names and tensors of a folder, with the interface that the bridge expects."""

    def __init__(self, names: Collection[str], weights: Mapping[str, Tensor]) -> None:
        self.source = _TensorNames(names)
        self.weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def _transformers_config(folder: HfFolder) -> PretrainedConfig:
    """The folder's config as a transformers config. Custom code in the folder is not run."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = str(folder.config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise UserError(f"{folder.path / 'config.json'}: model_type {model_type!r} is unknown to transformers; use that of the family")
    # `from_dict` modifies nested sections, so it gets a copy. Nemotron-H's `time_step_limit` is left out: transformers writes its infinity
    # as an object that it cannot read back, and mtpctl supports only the default.
    config = {key: value for key, value in folder.config.items() if key != "time_step_limit"}
    return CONFIG_MAPPING[model_type].from_dict(deepcopy(config))


def _merge_adapter(task: ConversionTask) -> ConversionTask:
    adapter = getattr(task.megatron_module, "adapter", None)
    if isinstance(adapter, Adapter) and is_local(task) and task.param_name.endswith(".weight"):
        return replace(task, param_weight=adapter.merge_into(task.param_weight))
    return task


Destination = Callable[[Tensor], Tensor]
"""Maps a parameter to the tensor that receives its new value: the parameter itself, or a copy that replaces it later."""


class StreamMap:
    """Maps Hugging Face tensors to the parameters of the modules. Its constructor is collective.

    names: all tensors that the model's Hugging Face folder may have.
    """

    def __init__(self, bridge: WeightBridge, chunks: list[torch.nn.Module], names: Collection[str]) -> None:
        self.bridge, self.chunks = bridge.mapping(), chunks
        tasks = [task for task in self.bridge.build_conversion_tasks(bridge.pretrained(names), chunks) if task is not None]
        self.tasks = [task for task in tasks if is_local(task)]
        self.known = {name for task in tasks for name in hf_names(task)}
        """Names of the tensors that any rank needs."""


class WeightStream:
    """Loads tensors into modules as they arrive: `add` each tensor of a section once, then `finish`. Collective.

    A parameter may consist of several tensors (such as q, k and v), to which the stream holds references until the last one arrives. The
    parameter is then converted, sharded over the tensor-parallel ranks and copied, and the references are dropped.
    """

    def __init__(self, stream_map: StreamMap, names: Collection[str], destination: Destination) -> None:
        self.map = stream_map
        self.destination = destination
        self._incomplete = [task for task in stream_map.tasks if set(hf_names(task)) <= set(names)]
        self._uses = Counter(name for task in self._incomplete for name in hf_names(task))
        self._tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        """Add an unsharded tensor, and load the parameters that it completes. The caller must keep its memory until `copy_pending`."""
        if not self._uses[name]:
            return
        self._tensors[name] = tensor
        for task in [task for task in self._incomplete if name in hf_names(task) and all(part in self._tensors for part in hf_names(task))]:
            self._load(task)
            self._incomplete.remove(task)
        # Releases tensors that no other parameter needs.
        self._tensors = {key: value for key, value in self._tensors.items() if self._uses[key]}

    def copy_pending(self) -> None:
        """Copy the tensors that are still needed, after which the caller may reuse their memory."""
        self._tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}

    def finish(self) -> None:
        """End the section: update the copies of embeddings on other pipeline stages. Raises ValueError if tensors are missing."""
        if self._incomplete:
            missing = sorted({name for task in self._incomplete for name in hf_names(task) if name not in self._tensors})
            raise ValueError(f"the update ended without {', '.join(missing[:8])}")
        self.map.bridge._broadcast_shared_embeddings(self.map.chunks)

    def _load(self, task: LocalTask) -> None:
        weights = self.map.bridge.maybe_modify_loaded_hf_weight(task.mapping.hf_param, self._tensors)
        converted = task.mapping.hf_to_megatron(weights, task.megatron_module)
        if converted is not None:
            self.destination(task.param_weight).copy_(converted)
        for name in hf_names(task):
            self._uses[name] -= 1
