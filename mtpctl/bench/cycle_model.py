"""A model of any MiMo shape with known outputs, whose MTP layer is right for a chosen share of tokens.

The trunk predicts `token + 1`. Its attention and MLP have random weights but zero output projections, so it does the computation of a real
model without changing the result. The MTP layer passes on the embedding of its input token, from which the head also predicts `token + 1`.
If the marker element of that embedding is positive, a neuron of the layer's MLP adds the embedding of another token, which makes the
prediction wrong. The marker is positive for a random share of the vocabulary's lower half, and for all of its upper half.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpctl.errors import UserError
from mtpctl.families.configs import toy_config
from mtpctl.families.reading import shape_of
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import tensor_shapes

WRITERS = 8
"""Number of threads that write files."""
MARKER = 8.0
"""Magnitude of the marker; other elements of an embedding are about 1."""
SEED = 0
TINY = toy_config(vocab_size=1024, max_position_embeddings=1024, torch_dtype="float32")
ZERO = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def answer(token: int, count: int, vocab: int) -> list[int]:
    """The `count` tokens that the model generates after `token`."""
    return [(token + 1 + i) % vocab for i in range(count)]


def write_cycle_model(folder: Path, config: dict[str, object], *, acceptance: float, device: str) -> Path:
    """Write the model into `folder`, unless it already exists. acceptance: share of the lower half's tokens after which drafts are right.

    Raises UserError if the shape is not MiMo's with one MTP layer, or if the folder contains another model.
    """
    shape = shape_of(config)
    if shape.family != "mimo" or shape.mtp_layers != 1:
        raise UserError(f"--model: needs a MiMo shape with one MTP layer, this is {shape.family} with {shape.mtp_layers}")
    document = json.dumps(config | {"mtpctl_cycle": {"acceptance": acceptance, "seed": SEED}}, indent=1)
    if (folder / "config.json").is_file():
        existing = (folder / "config.json").read_text()
        if existing == document:
            return folder
        if "mtpctl_cycle" not in existing:
            raise UserError(f"{folder}: contains another model, which is not overwritten; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    # The config is written last, so that an incomplete folder is not used as a model.
    (folder / "config.json").unlink(missing_ok=True)
    files: dict[str, str] = {}

    def write(number: int, tensors: dict[str, Tensor]) -> None:
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, name))

    with ThreadPoolExecutor(WRITERS) as pool:
        for done in [pool.submit(write, number, part) for number, part in enumerate(_files(shape, config, acceptance, device))]:
            done.result()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(document)
    return folder


def _files(shape: ModelShape, config: dict[str, object], acceptance: float, device: str) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file (about 0.5 GiB), on the CPU and in the config's dtype."""
    dtype = getattr(torch, str(config["torch_dtype"]))
    special = _special(shape, acceptance, device)
    generator = torch.Generator(device).manual_seed(SEED + 1)
    part: dict[str, Tensor] = {}
    size = 0
    for name, dims in tensor_shapes(shape).items():
        if name in special:
            tensor = special[name]
        elif "norm" in name:
            tensor = torch.ones(dims, device=device)
        elif name.endswith(ZERO) or name.endswith("bias"):
            tensor = torch.zeros(dims, device=device)
        else:
            tensor = torch.empty(dims, device=device).normal_(0, 0.02, generator=generator)
        part[name] = tensor.to(dtype).cpu().contiguous()
        size += part[name].nbytes
        if size > 1 << 29:
            yield part
            part, size = {}, 0
    if part:
        yield part


def _special(shape: ModelShape, acceptance: float, device: str) -> dict[str, Tensor]:
    """The tensors that determine the predictions."""
    assert shape.mtp is not None
    generator = torch.Generator(device).manual_seed(SEED)
    vocab, hidden, layer = shape.vocab, shape.hidden, shape.mtp.layer.format(k=0)
    embedding = torch.randn(vocab, hidden, device=device, generator=generator)
    wrong = torch.rand(vocab, device=device, generator=generator) >= acceptance
    wrong[vocab // 2 :] = True
    # The marker is element 0 of every embedding.
    embedding[:, 0] = torch.where(wrong, MARKER, -MARKER)
    gate = torch.zeros(shape.ffn, hidden, device=device)
    gate[0, 0] = 4.0
    down = torch.zeros(hidden, shape.ffn, device=device)
    # If the marker is positive, the neuron outputs MARKER * silu(4 MARKER) and so adds four times the embedding; else almost 0.
    down[:, 0] = 4 * embedding[vocab - 1] / (4 * MARKER * MARKER)
    projection = torch.zeros(hidden, 2 * hidden, device=device)
    projection[:, hidden:] = torch.eye(hidden, device=device)
    up = torch.zeros(shape.ffn, hidden, device=device)
    up[0, 0] = 1.0
    return {
        shape.embedding_name: embedding,
        "lm_head.weight": embedding.roll(1, 0),
        f"{layer}mlp.gate_proj.weight": gate,
        f"{layer}mlp.up_proj.weight": up,
        f"{layer}mlp.down_proj.weight": down,
        f"{layer}self_attn.o_proj.weight": torch.zeros(hidden, shape.heads * shape.head_dim, device=device),
        shape.mtp.name(shape.mtp.projection, 0, shape.layers): projection,
    }
