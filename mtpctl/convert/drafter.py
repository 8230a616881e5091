"""Adds a drafter to a model's folder: MTP layers in the model's own format, or an EAGLE-3 or DFlash drafter in a subfolder.

The model's weight files are copied or linked unchanged, so the trunk stays bit-identical. A new drafter is a copy of the model's last
layers and norms, which work as decoder layers before any training. The new projection of an MTP layer adds the normed state and embedding;
that of an EAGLE-3 or DFlash drafter selects the last of its input states.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mtpctl.convert.hf_folder import HfConfig, HfFolder, split_drafter, write_config
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.convert.tensor_files import INDEX_FILES, FolderWeights
from mtpctl.errors import UserError
from mtpctl.families.drafters import DrafterKind, add_drafter_config
from mtpctl.families.reading import DRAFTER, shape_of
from mtpctl.families.shape import DFlashShape, Eagle3Shape, LayerKind, ModelShape, MtpConvention
from mtpctl.families.tensors import MTP_EXPERT_LAYER, aliases, section_of, tensor_shapes

MTP_FILE = "model-mtp.safetensors"
"""Weight file of added MTP layers."""
_INIT_STD = 0.02
"""Standard deviation of new matrices that are not copied from the model."""


def add_drafter(source: Path, target: Path, kind: DrafterKind | None = None, layers: int = 1, *, seed: int = 0) -> HfFolder:
    """Atomically create `target`: links to the files of the model in `source`, and a new drafter.

    Raises UserError if the model has a drafter, is quantized or does not support such a drafter, or if the disk is full.
    """
    weights = ModelWeights(source)
    config = add_drafter_config(weights.folder.config, kind, layers)
    if "quantization_config" in config:
        raise UserError(f"{source}: its weights are quantized; first convert them with mtpctl convert-hf to a checkpoint and back")
    derive_folder(source, target, config, initial_drafter(weights, shape_of(config), seed), link=True)
    return HfFolder.open(target)


def copy_with_drafter(source: Path, trained: Path, target: Path) -> HfFolder:
    """Atomically create `target`: a copy of the model in `source`, with the drafter of the folder `trained`."""
    weights = ModelWeights(trained)
    drafter = {name: weights[name] for name in weights if section_of(name, weights.shape) == "draft"}
    derive_folder(source, target, weights.folder.config, drafter, link=False)
    return HfFolder.open(target)


def initial_drafter(weights: ModelWeights, shape: ModelShape, seed: int) -> dict[str, Tensor]:
    """The tensors of a new drafter for the model `weights`. `shape` includes the drafter."""
    assert shape.mtp is not None
    alias_sources, shapes = aliases(shape), tensor_shapes(shape)
    required_shapes = {name: size for name, size in shapes.items() if name not in alias_sources and section_of(name, shape) == "draft"}
    dtype = weights.dtype(shape.norm_name)
    generator = torch.Generator().manual_seed(seed)
    if shape.eagle3 is not None:
        tensors = dict(_eagle3_tensors(weights, shape, shape.eagle3))
    elif shape.dflash is not None:
        tensors = dict(_dflash_tensors(weights, shape, shape.dflash))
    else:
        tensors = dict(_mtp_tensors(weights, shape))
    for name, size in required_shapes.items():
        if name not in tensors:
            # The down-projection starts at zero, so a new MLP has no effect at first.
            std = 0.0 if "down_proj" in name else _INIT_STD
            tensors[name] = torch.randn(size, generator=generator) * std
        assert tuple(tensors[name].shape) == size, f"{name}: {tuple(tensors[name].shape)}, but {size} is required"
    return {name: tensors[name].to(dtype).clone(memory_format=torch.contiguous_format) for name in required_shapes}


def _mtp_tensors(weights: ModelWeights, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    mtp, hidden = shape.mtp, shape.hidden
    assert mtp is not None
    identity_norm = torch.zeros(hidden) if shape.delta is not None else torch.ones(hidden)
    for depth in range(shape.mtp_layers):

        def name(template: str, depth: int = depth) -> str:
            return mtp.name(template, depth, shape.layers)

        # The projection adds normed state and normed embedding, so it does not depend on which of them a family concatenates first.
        yield name(mtp.projection), torch.cat([torch.eye(hidden), torch.eye(hidden)], 1)
        yield name(mtp.embedding_norm), identity_norm
        yield name(mtp.hidden_norm), identity_norm
        if mtp.final_norm is not None:
            yield name(mtp.final_norm), weights[shape.norm_name]
        for drafter_layer, source_prefix in _layer_prefixes(shape, mtp):
            for source_name in weights:
                # A dense MTP layer in a model with experts copies only the attention and norms of the last decoder layer.
                if source_name.startswith(source_prefix) and not (mtp.dense and ".mlp." in source_name):
                    name_in_layer = source_name.removeprefix(source_prefix).replace("post_attention_layernorm", mtp.mlp_norm)
                    yield name(drafter_layer) + name_in_layer, weights[source_name]


def _layer_prefixes(shape: ModelShape, mtp: MtpConvention) -> Iterator[tuple[str, str]]:
    """Prefix pairs: each layer of the drafter, and the last decoder layer of the same kind, from which it is copied."""

    def last_layer_of(kind: LayerKind) -> str:
        return f"{shape.prefix}layers.{max(index for index, layer_kind in enumerate(shape.layer_kinds) if layer_kind == kind)}."

    yield mtp.layer, last_layer_of(mtp.kind)
    if shape.mamba is not None:
        last_sparse = max(index for index in range(shape.layers) if shape.mlp_of(index) == "sparse")
        yield MTP_EXPERT_LAYER, f"{shape.prefix}layers.{last_sparse}."


def _eagle3_tensors(weights: ModelWeights, shape: ModelShape, eagle3: Eagle3Shape) -> Iterator[tuple[str, Tensor]]:
    mtp, hidden = shape.mtp, shape.hidden
    assert mtp is not None
    source_prefix = f"{shape.prefix}layers.{shape.layers - 1}."
    # At first, the projection selects the state at the last boundary.
    yield mtp.projection, torch.cat([torch.zeros(hidden, hidden * (len(eagle3.boundaries) - 1)), torch.eye(hidden)], 1)
    yield mtp.embedding_norm, torch.ones(hidden)
    yield mtp.hidden_norm, weights[f"{source_prefix}input_layernorm.weight"]
    assert mtp.final_norm is not None
    yield mtp.final_norm, weights[shape.norm_name]
    yield f"{mtp.layer}post_attention_layernorm.weight", weights[f"{source_prefix}post_attention_layernorm.weight"]
    for part in "qkv":
        state_weight = weights[f"{source_prefix}self_attn.{part}_proj.weight"]
        yield f"{mtp.layer}self_attn.{part}_proj.weight", torch.cat([torch.zeros_like(state_weight), state_weight], 1)
    yield f"{mtp.layer}self_attn.o_proj.weight", weights[f"{source_prefix}self_attn.o_proj.weight"]
    for part in ("gate", "up", "down"):
        if f"{source_prefix}mlp.{part}_proj.weight" in weights:
            yield f"{mtp.layer}mlp.{part}_proj.weight", weights[f"{source_prefix}mlp.{part}_proj.weight"]


def _dflash_tensors(weights: ModelWeights, shape: ModelShape, dflash: DFlashShape) -> Iterator[tuple[str, Tensor]]:
    assert shape.mtp is not None and shape.mtp.final_norm is not None
    hidden, first_copied = shape.hidden, shape.layers - dflash.layers
    # At first, the projection selects the state at the last boundary.
    yield shape.mtp.projection, torch.cat([torch.zeros(hidden, hidden * (len(dflash.boundaries) - 1)), torch.eye(hidden)], 1)
    yield shape.mtp.hidden_norm, weights[f"{shape.prefix}layers.{shape.layers - 1}.input_layernorm.weight"]
    yield shape.mtp.final_norm, weights[shape.norm_name]
    for index in range(dflash.layers):
        drafter_prefix, source_prefix = f"drafter.layers.{index}.", f"{shape.prefix}layers.{first_copied + index}."
        for part in ("q", "k"):
            name = f"self_attn.{part}_norm.weight"
            yield f"{drafter_prefix}{name}", weights[f"{source_prefix}{name}"] if shape.qk_norm else torch.ones(shape.head_dim)
        matrices = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
        for name in (*matrices, "input_layernorm", "post_attention_layernorm"):
            if f"{source_prefix}{name}.weight" in weights:  # Experts are not copied.
                yield f"{drafter_prefix}{name}.weight", weights[f"{source_prefix}{name}.weight"]


def derive_folder(source: Path, target: Path, config: HfConfig, drafter: Mapping[str, Tensor], *, link: bool) -> None:
    """Atomically create `target`: the files of `source`, copied or linked, with `config` and the tensors `drafter`, which may be empty.

    Raises UserError if `target` exists or cannot be written.
    """
    mtp_tensors, subfolder_tensors = split_drafter(drafter)
    index = _make_index(source, mtp_tensors) if mtp_tensors else None
    if target.exists():
        raise UserError(f"{target}: exists; name another folder")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for file in _model_files(source):
            if mtp_tensors and str(file) == MTP_FILE:
                continue
            (partial / file).parent.mkdir(parents=True, exist_ok=True)
            if link:
                (partial / file).symlink_to((source / file).resolve())
            else:
                shutil.copyfile(source / file, partial / file)
        if subfolder_tensors:
            (partial / DRAFTER).mkdir()
            save_file(subfolder_tensors, partial / DRAFTER / "model.safetensors", metadata={"format": "pt"})
        if mtp_tensors:
            save_file(mtp_tensors, partial / MTP_FILE, metadata={"format": "pt"})
        if index is not None:
            (partial / INDEX_FILES[0]).unlink(missing_ok=True)
            (partial / INDEX_FILES[0]).write_text(json.dumps(index, indent=2) + "\n")
        write_config(config, partial)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{target}: cannot be written ({reason}); free space, or name another folder") from error


def _model_files(source: Path) -> Iterator[Path]:
    """The files of the model, relative to `source`, without config.json and hidden files."""
    for folder, folders, files in os.walk(source, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in sorted(files):
            path = (Path(folder) / name).relative_to(source)
            if not name.startswith(".") and str(path) != "config.json":
                yield path


def _make_index(source: Path, mtp_tensors: Mapping[str, Tensor]) -> HfConfig:
    """An index of the model's weights and the added layers. Raises UserError if the model's weights are pickled."""
    weights = FolderWeights(source)
    if any(entry.start is None for entry in weights.entries.values()):
        raise UserError(f"{source}: its weights are pickled; convert them to safetensors first")
    weight_map = {name: entry.file.name for name, entry in weights.entries.items()} | dict.fromkeys(mtp_tensors, MTP_FILE)
    total_bytes = weights.nbytes + sum(tensor.nbytes for tensor in mtp_tensors.values())
    return {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
