"""Detects whether a path is a Hugging Face folder, a checkpoint or a run, and finds the Hugging Face model of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from mtpctl.checkpoint.finding import ENGINE_FILE, check_checkpoint, find_complete_checkpoint
from mtpctl.checkpoint.listing import LISTING, Damaged, pointer_of
from mtpctl.checkpoint.reading import check_shards, tensors_in
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.convert.model_weights import ModelWeights, Stored, load_layout
from mtpctl.convert.parts import is_checkpoint
from mtpctl.convert.tensor_files import FolderWeights
from mtpctl.errors import UserError
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import aliases, count_parameters, section_of, tensor_shapes
from mtpctl.recipe.loading import load_recipe

HF_FOLDER = "hf"
"""Folder inside a converted checkpoint with the files that are needed to convert it back."""

LAYOUT_FILE = "layout.json"


@dataclass(frozen=True)
class Reference:
    """The Hugging Face model of a checkpoint.

    layout: how its folder stores tensors; None for the family's plain layout. extra_weights: the folder's weight files, from which tensors
    outside the language model are copied. files: folders whose other files are copied. weights: the folder's weights, if it has any.
    """

    folder: HfFolder
    layout: list[Stored] | None
    extra_weights: FolderWeights | None
    files: list[Path] = field(default_factory=list)
    weights: ModelWeights | None = None


def find_checkpoint(path: Path, report: Callable[[str], None] = lambda line: None, *, verify_checksums: bool = True) -> Path | None:
    """Find the checkpoint at `path`: a checkpoint, or a run directory or its `checkpoints`, of which the newest is used.

    Damaged checkpoints of a run are reported and skipped.

    Args:
        path: the path that the user named.
        report: called with messages to the user.
        verify_checksums: compare files with their checksums, not only their sizes.

    Returns:
        The checkpoint; None if `path` is a Hugging Face folder.

    Raises:
        UserError: if `path` is none of these, or a damaged checkpoint.
    """
    if not path.is_dir():
        raise UserError(f"{path}: there is no such folder")
    if is_checkpoint(path) or any((path / name).is_file() for name in (ENGINE_FILE, LISTING)):
        try:
            if any((path / name).is_file() for name in (ENGINE_FILE, LISTING)):
                check_checkpoint(path, verify_checksums=verify_checksums)
            else:  # a checkpoint of another program
                check_shards(path)
                report(f"{path} has no checksums: its contents are not verified")
        except Damaged as damage:
            raise UserError(f"{path}/{damage}; name another checkpoint, or the run for its newest undamaged one") from damage
        return path
    if (path / "config.json").is_file():
        return None
    checkpoints = path / "checkpoints"
    if not checkpoints.is_dir() and (pointer_of(path).exists() or path.name == checkpoints.name):
        checkpoints = path
    if checkpoints.is_dir():
        choice = find_complete_checkpoint(checkpoints, verify_checksums=verify_checksums)
        for line in choice.lines:
            report(line)
        if choice.path is not None:
            return choice.path
    raise UserError(
        f"{path}: is neither a Hugging Face folder (config.json with weights), nor a Megatron checkpoint (metadata.json), "
        "nor a run directory with a checkpoint"
    )


def find_reference(checkpoint: Path, model: Path | None) -> Reference:
    """The Hugging Face model of a checkpoint: `model` if given, else the folder inside the checkpoint or the one in its run's recipe."""
    converted_folder = checkpoint / HF_FOLDER
    if model is None and (converted_folder / LAYOUT_FILE).is_file():
        extra_weights = FolderWeights(converted_folder) if any(converted_folder.glob("*.safetensors")) else None
        return Reference(
            HfFolder.open(converted_folder, weights=False), load_layout(converted_folder / LAYOUT_FILE), extra_weights, [converted_folder]
        )
    file_folders: list[Path] = []
    if model is None:
        model, file_folders = _find_model_of_run(checkpoint)
    if any(model.glob("*.safetensors")) or any(model.glob("*.bin")):
        weights = ModelWeights(model)
        return Reference(weights.folder, weights.layout, weights.raw, [model, *file_folders], weights)
    return Reference(HfFolder.open(model, weights=False), None, None, [model, *file_folders])


def _find_model_of_run(checkpoint: Path) -> tuple[Path, list[Path]]:
    """The model folder of the run that saved a checkpoint, and the folder of the run's own tokenizer, if it has one."""
    run = checkpoint.parent.parent
    file = run / "recipe.resolved.yaml"
    if not file.is_file():
        raise UserError(f"{checkpoint}: does not name its model; name the model's folder with --model")
    recipe = load_recipe(file).recipe
    model = recipe.model.folder_in(run) or Path(recipe.model.path or "")
    if not (model / "config.json").is_file():
        raise UserError(f"{file}: model.path {recipe.model.path} is not a folder on this machine; name the model's folder with --model")
    tokenizer = run / "tokenizer"
    return model, [tokenizer] if tokenizer.is_dir() else []


def has_mtp(checkpoint: Path) -> bool:
    return any(name.startswith("mtp.") for name in tensors_in(checkpoint))


def count_elements(shape: ModelShape, *, mtp: bool) -> dict[str, int]:
    """The number of elements of each of the model's tensors, without aliases. mtp: include the MTP layers."""
    alias_names, sizes = aliases(shape), tensor_shapes(shape).items()
    return {name: prod(size) for name, size in sizes if name not in alias_names and (mtp or section_of(name, shape) == "target")}


def inspect(source: Path, model: Path | None) -> dict[str, object]:
    """The output of `convert-hf --inspect`. Raises UserError if `source` is neither a folder, a checkpoint nor a run."""
    checkpoint = find_checkpoint(source, verify_checksums=False)
    return _inspect_folder(source) if checkpoint is None else _inspect_checkpoint(checkpoint, model)


def _inspect_folder(path: Path) -> dict[str, object]:
    shape = HfFolder.open(path, weights=False).shape
    try:
        weights = ModelWeights(path)
    except UserError as error:
        return {"kind": "Hugging Face folder", **_describe_shape(shape), "missing": str(error)}
    stored_weights = weights.raw
    dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in stored_weights.entries.values()})
    description = {
        "kind": "Hugging Face folder",
        **_describe_shape(weights.shape),
        "dtype": dtypes,
        "bytes": stored_weights.nbytes,
        "files": len(stored_weights.files),
    }
    return description | {"carried": f"{len(weights.extras)} tensors outside the language model", "missing": "nothing"}


def _inspect_checkpoint(path: Path, model: Path | None) -> dict[str, object]:
    model_tensors = {name: tensor for name, tensor in tensors_in(path).items() if "optimizer." not in name}
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in model_tensors.values()})
    description: dict[str, object] = {"kind": "Megatron checkpoint", "path": str(path)}
    try:
        shape = find_reference(path, model).folder.shape
    except UserError as error:
        return description | {"tensors": len(model_tensors), "dtype": dtypes, "missing": str(error)}
    missing = "the MTP layers" if shape.mtp_layers and not has_mtp(path) else "nothing"
    return description | _describe_shape(shape) | {"tensors": len(model_tensors), "dtype": dtypes, "missing": missing}


def _describe_shape(shape: ModelShape) -> dict[str, object]:
    counts = count_parameters(shape)
    description = {
        "family": f"{shape.family} ({shape.architecture})",
        "parameters": f"{counts['total']:,}",
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": f"{shape.heads}, {shape.kv_heads} for keys and values",
        "vocabulary": f"{shape.vocab}{', tied' if shape.tied else ''}",
        "positions": shape.max_positions,
        "MTP layers": f"{shape.mtp_layers}, {counts['mtp']:,} parameters" if shape.mtp_layers else "0",
    }
    if shape.moe is not None:
        description["experts"] = f"{shape.moe.experts}, {shape.moe.experts_per_token} for each token"
    return description
