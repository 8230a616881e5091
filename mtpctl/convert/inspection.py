"""`--inspect`: what a path holds, without converting it."""

from __future__ import annotations

from pathlib import Path

from mtpctl.checkpoint.reading import tensors_in
from mtpctl.convert.model_weights import ModelWeights
from mtpctl.convert.source import checkpoint_at, has_mtp, reference_of
from mtpctl.errors import UserError
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import count_parameters


def inspect(source: Path, model: Path | None) -> dict[str, object]:
    """Kind, family, sizes, MTP layers, types, and what is missing. Raises UserError where `source` is no model at all."""
    checkpoint = checkpoint_at(source, contents=False)
    return _folder(source) if checkpoint is None else _checkpoint(checkpoint, model)


def _folder(path: Path) -> dict[str, object]:
    from mtpctl.convert.folder_weights import FolderWeights
    from mtpctl.convert.hf_folder import HfFolder

    shape = HfFolder.open(path, weights=False).shape
    try:
        weights = ModelWeights(path)
    except UserError as error:
        return {"kind": "Hugging Face folder", **_sizes(shape), "missing": str(error)}
    raw: FolderWeights = weights.raw
    types = sorted({str(entry.dtype).removeprefix("torch.") for entry in raw.entries.values()})
    found = {"kind": "Hugging Face folder", **_sizes(weights.shape), "dtype": types, "bytes": raw.nbytes, "files": len(raw.files)}
    return found | {"carried": f"{len(weights.extras)} tensors beside the language model", "missing": "nothing"}


def _checkpoint(path: Path, model: Path | None) -> dict[str, object]:
    saved = {name: tensor for name, tensor in tensors_in(path).items() if "optimizer." not in name}
    types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in saved.values()})
    found: dict[str, object] = {"kind": "Megatron checkpoint", "path": str(path)}
    try:
        shape = reference_of(path, model).folder.shape
    except UserError as error:
        return found | {"tensors": len(saved), "dtype": types, "missing": str(error)}
    lacks = "the MTP layers" if shape.mtp_layers and not has_mtp(path) else "nothing"
    return found | _sizes(shape) | {"tensors": len(saved), "dtype": types, "missing": lacks}


def _sizes(shape: ModelShape) -> dict[str, object]:
    counts = count_parameters(shape)
    found = {
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
        found["experts"] = f"{shape.moe.experts}, {shape.moe.experts_per_token} for each token"
    return found
