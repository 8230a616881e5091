"""A model of any MiMo shape whose next token is known, and whose MTP layer is right on a chosen share of the vocabulary.

The trunk predicts `token + 1`. Its attention and MLP have random weights and output projections of zero, so that every matrix is multiplied
as in a real model and changes nothing. The MTP layer passes on the embedding of the token that it reads, from which the head predicts the
same. Where a marker in that embedding is set, a neuron of the layer's MLP adds the embedding of another token, and the prediction is wrong.
The marker is set on a random share of the vocabulary's lower half, and on all of its upper half.
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
from mtpctl.families.reading import shape_of
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import tensor_shapes

WRITERS = 8
"""Threads that write files."""
MARKER = 8.0
"""Size of the marker; other elements of an embedding are about 1."""
SEED = 0
ZERO = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def answer(token: int, count: int, vocab: int) -> list[int]:
    """The `count` tokens that the model generates after `token`."""
    return [(token + 1 + place) % vocab for place in range(count)]


def write_cycle_model(folder: Path, config: dict[str, object], *, acceptance: float, device: str) -> Path:
    """Write the model into `folder` unless it is there already. Drafts after tokens of the lower half are right with `acceptance`.

    Raises UserError for a shape whose MTP convention is not MiMo's, and for a folder that holds another model.
    """
    shape = shape_of(config)
    if shape.family != "mimo" or shape.mtp_layers != 1:
        raise UserError(f"--model: a cycle can be made of MiMo shapes with one MTP layer, this is {shape.family} with {shape.mtp_layers}")
    told = json.dumps(config | {"mtpctl_cycle": {"acceptance": acceptance, "seed": SEED}}, indent=1)
    if (folder / "config.json").is_file():
        there = (folder / "config.json").read_text()
        if there == told:
            return folder
        if "mtpctl_cycle" not in there:
            raise UserError(f"{folder}: holds a model that was not made here, and is not overwritten; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    # The config is written last: without it, a half-written folder is not taken for a model.
    (folder / "config.json").unlink(missing_ok=True)
    files: dict[str, str] = {}

    def write(number: int, tensors: dict[str, Tensor]) -> None:
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, name))

    with ThreadPoolExecutor(WRITERS) as pool:
        for done in [pool.submit(write, number, part) for number, part in enumerate(_parts(shape, config, acceptance, device))]:
            done.result()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(told)
    return folder


def _parts(shape: ModelShape, config: dict[str, object], acceptance: float, device: str) -> Iterator[dict[str, Tensor]]:
    """The tensors in parts of about 0.5 GiB, one for each file, on the CPU and in the config's dtype."""
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
    # The neuron gives MARKER * silu(4 MARKER) where the marker is set, and nothing where it is not: four times the embedding is added.
    down[:, 0] = 4 * embedding[vocab - 1] / (4 * MARKER * MARKER)
    projection = torch.zeros(hidden, 2 * hidden, device=device)
    projection[:, hidden:] = torch.eye(hidden, device=device)
    up = torch.zeros(shape.ffn, hidden, device=device)
    up[0, 0] = 1.0
    return {
        f"{shape.prefix}embed_tokens.weight": embedding,
        "lm_head.weight": embedding.roll(1, 0),
        f"{layer}mlp.gate_proj.weight": gate,
        f"{layer}mlp.up_proj.weight": up,
        f"{layer}mlp.down_proj.weight": down,
        f"{layer}self_attn.o_proj.weight": torch.zeros(hidden, shape.heads * shape.head_dim, device=device),
        shape.mtp.name(shape.mtp.projection, 0, shape.layers): projection,
    }
