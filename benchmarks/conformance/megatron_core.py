"""megatron-core's MTP block and loss under `benchmarks/mtp_conformance.py`, in float64 on a CPU.

`MultiTokenPredictionBlock` and `process_mtp_loss` run as installed, with the process groups of the case and an identity for the transformer
layer. Around them are the steps of Megatron's training loop: the scale of the loss (`schedules.py`), the average or sum of gradients over
ranks (`distributed_data_parallel.py`) and, with `calculate_per_token_loss`, the division by all tokens (`finalize_model_grads.py`).
"""

from __future__ import annotations

import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from mtp_conformance import EPS, HIDDEN, SHARED, Case, Convention, Result, Row, Trainer
from mtpctl.compat import cpu_device, megatron_core

megatron_core.skip_compilation()
cpu_device.install()
torch.set_num_threads(1)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer import multi_token_prediction as mtp  # noqa: E402


class Identity(nn.Module):
    """Stands for the transformer layer."""

    def __init__(self, **_: object) -> None:
        super().__init__()

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        return hidden_states, None


def local(values: list[int], row: Row, cp: int) -> Tensor:
    """This context-parallel rank's part [1, T]: of each sample the chunks r and 2·cp − 1 − r."""
    rank = parallel_state.get_context_parallel_rank()
    parts: list[Tensor] = []
    for start, end in zip(row.cu_seqlens_padded, row.cu_seqlens_padded[1:], strict=False):
        chunks = torch.tensor(values[start:end]).chunk(2 * cp) if cp > 1 else [torch.tensor(values[start:end])]
        parts += [chunks[rank], chunks[-1 - rank]] if cp > 1 else chunks
    return torch.cat(parts)[None]


def block_of(case: Case, config: TransformerConfig, weights: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    """The block with the case's weights, and its parameters by their names in megatron-core."""
    spec = mtp.get_mtp_layer_spec(Identity, use_transformer_engine=False)  # type: ignore[arg-type]
    layers = 1 if case.repeated else case.depths
    block = mtp.MultiTokenPredictionBlock(config, mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * layers)).double()
    for number, layer in enumerate(block.layers, 1):
        for theirs, ours in (("enorm", "embedding_norm"), ("hnorm", "state_norm"), ("final_layernorm", "norm")):
            getattr(layer, theirs).weight.data.copy_(weights[f"{number}.{ours}"])
        layer.eh_proj.weight.data.copy_(torch.cat([weights[f"{number}.{part}_projection"] for part in ("embedding", "state")], dim=1))
    return block, dict(block.named_parameters())


def row_backward(row: Row, case: Case, config: TransformerConfig, block: nn.Module, shared: dict[str, Tensor]) -> Tensor:
    """Forward and backward of a microbatch. Returns the number of supervised tokens of the main loss on this rank."""
    shifted = [(*row.tokens[1:], 0), (*row.mask[1:], 0)]
    for end in row.cu_seqlens_padded[1:]:  # the last token of a sample has no label
        shifted = [(*values[: end - 1], 0, *values[end:]) for values in shifted]
    ids, labels, mask = (local(list(values), row, case.cp) for values in (row.tokens, *shifted))
    packed = None
    if len(row.samples) > 1 or row.cu_seqlens != row.cu_seqlens_padded:
        plain, padded = (torch.tensor(lengths, dtype=torch.int32) for lengths in (row.cu_seqlens, row.cu_seqlens_padded))
        packed = PackedSeqParams("thd", plain, plain, padded, padded)

    def embedding(input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, shared["embedding"]).transpose(0, 1)

    def token_losses(labels: Tensor, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")

    state = F.rms_norm(embedding(ids, ids), (HIDDEN,), shared["norm"], EPS)
    states = block(ids, torch.zeros_like(ids), state, None, packed_seq_params=packed, embedding=embedding)
    out = mtp.process_mtp_loss(
        hidden_states=states,
        labels=labels,
        loss_mask=mask.double(),
        output_layer=lambda hidden, weight, runtime_gather_output: (F.linear(hidden, weight), None),
        output_weight=shared["embedding" if case.tied else "head"],
        runtime_gather_output=None,
        is_training=True,
        compute_language_model_loss=token_losses,
        config=config,
        cp_group=parallel_state.get_context_parallel_group(),
        packed_seq_params=packed,
    )
    (0.0 * out.sum()).backward()  # the main loss has no weight; the MTP loss adds its gradients in this pass
    return mask.sum()


def rank_main(rank: int, case: Case, per_token: bool, folder: str) -> None:
    world = len(case.ranks) * case.cp
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(context_parallel_size=case.cp)
    settings: dict[str, Any] = {"mtp_detach_heads": case.detached, "mtp_use_repeated_layer": case.repeated, "layernorm_epsilon": EPS}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        context_parallel_size=case.cp,
        mtp_num_layers=case.depths,
        mtp_loss_scaling_factor=1.0,
        calculate_per_token_loss=per_token,
        **settings,
    )
    weights = case.weights()
    block, parameters = block_of(case, config, weights)
    shared = {name: value.requires_grad_() for name, value in weights.items() if name in SHARED}
    rows = case.rows()[parallel_state.get_data_parallel_rank()]
    mtp.MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0 if per_token else 1 / len(rows)))
    tokens = sum((row_backward(row, case, config, block, shared) for row in rows), torch.tensor(0))
    dist.all_reduce(tokens)
    mtp.MTPLossLoggingHelper.reduce_metrics_in_tracker()
    losses = mtp.MTPLossLoggingHelper.tracker["loss_values"] / len(rows)
    gradients = {}
    for name, value in (parameters | shared).items():
        gradients[name] = torch.zeros_like(value) if value.grad is None else value.grad
        dist.all_reduce(gradients[name])
        gradients[name] /= tokens if per_token else world
    if rank == 0:
        torch.save((losses.tolist(), gradients), f"{folder}/result.pt")
    dist.destroy_process_group()


def run(case: Case, *, per_token: bool) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (case, per_token, folder), nprocs=len(case.ranks) * case.cp, start_method="fork")
        losses, gradients = torch.load(Path(folder) / "result.pt")
    for name in [gradient_name for gradient_name in gradients if gradient_name.startswith("layers.")]:
        _, index, module, *_ = name.split(".")
        layer, gradient = f"{int(index) + 1}.", gradients.pop(name)
        if module == "eh_proj":
            gradients[f"{layer}embedding_projection"], gradients[f"{layer}state_projection"] = gradient.chunk(2, dim=1)
        else:
            gradients[layer + {"enorm": "embedding_norm", "hnorm": "state_norm", "final_layernorm": "norm"}[module]] = gradient
    return Result(losses, gradients)


NAME, CONVENTION = f"megatron-core {version('megatron-core')}", Convention("target", "normed")
TRAINERS = {
    NAME: Trainer(CONVENTION, partial(run, per_token=False)),
    f"{NAME}, `calculate_per_token_loss`": Trainer(CONVENTION, partial(run, per_token=True)),
}
