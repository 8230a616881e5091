"""Write a mixture of experts of Qwen3.5-35B-A3B's shape with known answers, for RL without real weights.

Token v is followed by token v + 1 with a probability near 1, and drafts of the MTP layer are always right. Output projections are zero,
so the final hidden state is the input's embedding, and row v + 1 of the LM head is the embedding of v. The MTP layer's first projection
selects the embedding of its input token. All other weights are random, and every layer computes as usual. With the tokenizer `bytes`, a
response to a prompt that ends with `=` (token 61) has 197 tokens, because the end token has the number 258.

    python benchmarks/known_mixture.py FOLDER --device cuda      # 71 GB
    python benchmarks/known_mixture.py FOLDER --toy              # a few MB
"""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from harness import parser
from mtpctl.families.configs import hub_config
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import tensor_shapes

MODEL = "Qwen/Qwen3.5-35B-A3B"
TOY: dict[str, object] = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_nextn_predict_layers": 1,  # vLLM's CPU build requires it
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
}
ZERO_MATRICES = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
LOGIT = 40.0
"""Approximate logit of the right token. Those of the others are random, with a standard deviation of 40 / √hidden."""
FILE_BYTES = 1 << 30
NUM_WRITERS = 8
STD = 0.02


def make_tensor(name: str, size: tuple[int, ...], embedding: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    hidden, device = embedding.shape[1], embedding.device
    if name == "model.embed_tokens.weight":
        return embedding
    if name == "lm_head.weight":
        return embedding.roll(1, 0) * (LOGIT / hidden)
    if name == "mtp.fc.weight":  # of the embedding and the trunk's hidden state
        return torch.eye(hidden, 2 * hidden, device=device)
    if name.endswith("linear_attn.norm.weight"):
        return torch.ones(size, device=device)
    # Other norms add 1 to their weights.
    if len(size) == 1 or name.endswith(ZERO_MATRICES):
        return torch.zeros(size, device=device)
    return torch.empty(size, device=device).normal_(0, STD, generator=generator)


def write_known_mixture(folder: Path, changes: dict[str, object], device: str) -> None:
    """Write config and weights in bf16. `changes`: fields that replace those of the model's config."""
    config = hub_config(MODEL) | changes
    shape = shape_of(config)
    folder.mkdir(parents=True)
    generator = torch.Generator(device).manual_seed(0)
    embedding = torch.randn(shape.vocab, shape.hidden, generator=generator, device=device)
    weight_map: dict[str, str] = {}
    writes: list[Future[None]] = []
    with ThreadPoolExecutor(NUM_WRITERS) as pool:

        def write(tensors: dict[str, torch.Tensor]) -> None:
            name = f"model-{len(writes):05d}.safetensors"
            weight_map.update(dict.fromkeys(tensors, name))
            writes.append(pool.submit(save_file, tensors, folder / name, metadata={"format": "pt"}))
            if len(writes) > NUM_WRITERS:
                writes[-NUM_WRITERS - 1].result()  # bounds the memory of pending files

        tensors: dict[str, torch.Tensor] = {}
        for name, size in tensor_shapes(shape).items():
            tensors[name] = make_tensor(name, size, embedding, generator).to(torch.bfloat16).cpu().contiguous()
            if sum(tensor.nbytes for tensor in tensors.values()) > FILE_BYTES:
                write(tensors)
                tensors = {}
        write(tensors)
        for future in writes:
            future.result()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("folder", type=Path, help="a new folder")
    options.add_argument("--device", default="cpu", help="where the weights are drawn")
    options.add_argument("--toy", action="store_true", help="a small model")
    arguments = options.parse_args()
    if arguments.folder.exists():
        options.error(f"{arguments.folder} exists")
    write_known_mixture(arguments.folder, TOY if arguments.toy else {}, arguments.device)


if __name__ == "__main__":
    main()
