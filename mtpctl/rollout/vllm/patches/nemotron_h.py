"""Fixes for Nemotron-H (vLLM 0.32.0): decays and MTP layer; on CPUs also experts without a gate, and drafts in Mamba-2 layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches import assign, cpu_patch, patch
from mtpctl.rollout.vllm.patches.cpu_kernels import SequentialExperts, convolve
from mtpctl.rollout.vllm.patches.weights import LOG_DECAY, save_loaded_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.models.nemotron_h_mtp import NemotronHMTP


@patch
def install_log_decays() -> None:
    """Keep the logarithm of a Mamba-2 layer's decays as loaded.

    Folders and updates have `A_log`, but vLLM keeps only `A` = −exp(`A_log`), so an update would have nothing to write to. The logarithm
    cannot be computed from `A`, because the result differs in the last bits.
    """
    from vllm.model_executor.layers.mamba import mamba_mixer2

    if getattr(mamba_mixer2, "composed_weight_loader", None) is None:
        raise UpstreamMoved(f"{__name__}: {mamba_mixer2.__name__}.composed_weight_loader is gone; find how the decays are loaded")

    def composed_weight_loader(
        loader: Callable[[Tensor, Tensor], None], transform: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor, Tensor], None]:
        def load(parameter: Tensor, loaded_tensor: Tensor) -> None:
            loader(parameter, loaded_tensor)
            setattr(parameter, LOG_DECAY, parameter.data.clone())
            parameter.data.copy_(transform(parameter))

        return load

    assign(mamba_mixer2, composed_weight_loader=composed_weight_loader)


@patch
def install_draft_dtype() -> None:
    """Create the projection of the MTP layer in the engine's dtype.

    vLLM creates it in the dtype of config.json, even if the engine has another one. The first draft then fails, because the projection and
    its input have different dtypes.
    """
    from vllm.model_executor.models import nemotron_h_mtp as model

    if "params_dtype=config.dtype" not in inspect.getsource(model.NemotronHMTPAttentionDecoderLayer.__init__):
        raise UpstreamMoved(f"{__name__}: Nemotron-H's MTP layer no longer has the dtype of config.json; remove the patch")
    upstream = model.NemotronHMTP.__init__

    @wraps(upstream)
    def init(self: NemotronHMTP, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        assert vllm_config.speculative_config is not None
        draft = vllm_config.speculative_config.draft_model_config
        draft.hf_config.get_text_config().dtype = draft.dtype
        upstream(self, vllm_config=vllm_config, prefix=prefix)

    assign(model.NemotronHMTP, __init__=init)


@cpu_patch
def install_ungated_experts() -> None:
    """Compute experts without a gate, a squared ReLU between two matrices, in PyTorch.

    vLLM's grouped kernel for CPUs computes gated experts only, so `FusedMoEConfig` rejects other experts on a CPU.
    """
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    if CPUUnquantizedExperts._supports_no_act_and_mul():
        raise UpstreamMoved(f"{__name__}: vLLM's CPU backend computes experts without a gate; remove the patch")
    if not hasattr(unquantized, "backend_to_kernel_cls"):
        raise UpstreamMoved(f"{__name__}: {unquantized.__name__}.backend_to_kernel_cls is gone; find where the expert kernel is chosen")

    class UngatedExperts(SequentialExperts, CPUUnquantizedExperts):  # type: ignore[misc]
        @staticmethod
        def _supports_no_act_and_mul() -> bool:
            return True

        @staticmethod
        def _supports_activation(activation: MoEActivation) -> bool:
            return activation is MoEActivation.RELU2_NO_MUL

        @staticmethod
        def is_supported_config(cls: type[FusedMoEExperts], *args: Any) -> tuple[bool, str | None]:
            return FusedMoEExperts.is_supported_config(cls, *args)

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            save_loaded_weights(self, layer)

        def run_expert(self, states: Tensor, w1: Tensor, w2: Tensor, expert: int) -> Tensor:
            return run_ungated(states, w1[expert], w2[expert])

    upstream_post_init, upstream_kernels = FusedMoEConfig.__post_init__, unquantized.backend_to_kernel_cls

    @wraps(upstream_post_init)
    def post_init(self: FusedMoEConfig) -> None:
        try:
            upstream_post_init(self)
        except NotImplementedError as error:
            # This is the last check of the method, so nothing after it is skipped.
            if "is_act_and_mul" not in str(error):
                raise

    @wraps(upstream_kernels)
    def backend_to_kernel_cls(backend: UnquantizedMoeBackend) -> list[type[FusedMoEExperts]]:
        ungated_experts = [UngatedExperts] if backend.name == "CPU" else []
        return [*upstream_kernels(backend), *ungated_experts]

    assign(FusedMoEConfig, __post_init__=post_init)
    assign(unquantized, backend_to_kernel_cls=backend_to_kernel_cls)


def run_ungated(states: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The output of an expert without a gate. states [t, H]; up [F, H]; down [H, F] → [t, H]."""
    return functional.linear(functional.relu(functional.linear(states, up)).square(), down)


@cpu_patch
def install_mamba_drafts() -> None:
    """Verify drafts in Mamba-2 layers.

    With speculation, a step of a sequence has several tokens. It continues from the state after the last accepted token of the previous
    step, and stores the state after each of its tokens in a separate slot. vLLM's functions for CPUs ignore the number of accepted tokens:
    the convolution and the scan continue from the wrong token, and log-probs are off by thousandths of a nat even in a toy.
    """
    from vllm.model_executor.layers.mamba import mamba_mixer2

    upstream_convolution, upstream_scan = (getattr(mamba_mixer2, name, None) for name in ("causal_conv1d_update", "selective_state_update"))
    if upstream_convolution is None or upstream_scan is None:
        raise UpstreamMoved(f"{__name__}: {mamba_mixer2.__name__} no longer has causal_conv1d_update and selective_state_update")
    if not _ignores_accepted():
        raise UpstreamMoved(f"{__name__}: vLLM's CPU kernel for Mamba-2 reads the number of accepted tokens; remove the patch")

    def causal_conv1d_update(
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        *,
        conv_state_indices: Tensor,
        num_accepted_tokens: Tensor | None = None,
        query_start_loc: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if num_accepted_tokens is None or query_start_loc is None:
            result: Tensor = upstream_convolution(
                x, conv_state, weight, bias, activation, conv_state_indices=conv_state_indices, query_start_loc=query_start_loc, **options
            )
            return result
        lengths, accepted_counts, slots = query_start_loc.diff().tolist(), num_accepted_tokens.tolist(), conv_state_indices[:, 0].tolist()
        # Padding sequences have no tokens, and no state to read.
        active_sequences = [index for index, tokens in enumerate(lengths) if tokens]
        convolved = convolve(
            x,
            [lengths[index] for index in active_sequences],
            [accepted_counts[index] for index in active_sequences],
            [conv_state[slots[index]] for index in active_sequences],
            weight[:, None],
            bias,
        )
        return functional.silu(convolved) if activation in ("silu", "swish") else convolved

    def selective_state_update(state: Tensor, *args: Any, num_accepted_tokens: Tensor | None = None, **kwargs: Any) -> None:
        if num_accepted_tokens is None:
            upstream_scan(state, *args, num_accepted_tokens=None, **kwargs)
            return
        x, dt, decay, b, c, skip, dt_bias = args
        scan_drafts(
            state,
            x,
            functional.softplus(dt[..., 0].float() + dt_bias[:, 0].float()),
            decay[:, 0, 0],
            b,
            c,
            skip[:, 0],
            kwargs["state_batch_indices"],
            num_accepted_tokens,
            kwargs["cu_seqlens"],
            kwargs["out"],
        )

    assign(mamba_mixer2, causal_conv1d_update=causal_conv1d_update, selective_state_update=selective_state_update)


def scan_drafts(
    states: Tensor,
    x_THP: Tensor,
    steps_TH: Tensor,
    decay_H: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    skip_H: Tensor,
    slots_SK: Tensor,
    accepted_S: Tensor,
    bounds: Tensor,
    out_THP: Tensor,
) -> None:
    """Scan the tokens of one step of S sequences, which are stored one sequence after another. Writes `states` and `out_THP`.

    Args:
        states: [slots, H heads, P, N].
        decay_H: the state decays by exp(decay · step) at each token.
        slots_SK: each sequence's K slots: the state after token k of a step is stored in slot k, where the next step may read it.
        accepted_S: number of accepted tokens in each sequence's previous step, at least 1; ignored for padding sequences (without tokens).
        bounds: [S + 1], start of each sequence's tokens, and the end of the last.
    """
    lengths = bounds.diff()
    per_group = x_THP.shape[1] // b_TGN.shape[1]
    b_THN, c_THN = (tensor.float().repeat_interleave(per_group, dim=1) for tensor in (b_TGN, c_TGN))
    # A padding sequence may have 0 accepted tokens. The state that is read for it is not used.
    last_accepted = (accepted_S[: len(lengths), None].long() - 1).clamp(min=0)
    state = states[slots_SK.gather(1, last_accepted)[:, 0].long()].float()
    for index in range(int(lengths.max())):
        rows = (lengths > index).nonzero()[:, 0]
        tokens = bounds[rows].long() + index
        x, steps = x_THP[tokens].float(), steps_TH[tokens]
        update = (steps[..., None] * x)[..., None] * b_THN[tokens][:, :, None]
        state[rows] = state[rows] * (steps * decay_H).exp()[..., None, None] + update
        out = (state[rows] @ c_THN[tokens][..., None])[..., 0] + skip_H.float()[:, None] * x
        out_THP[tokens] = out.to(out_THP.dtype)
        states[slots_SK[rows, index].long()] = state[rows].to(states.dtype)


def _ignores_accepted() -> bool:
    """Whether the kernel's output ignores the number of accepted tokens, which should select the state to continue from."""
    from vllm import _custom_ops as ops

    states, ones, slots = torch.zeros(3, 1, 1, 1), torch.ones(1, 1, 1), torch.tensor([[1, 2]], dtype=torch.int32)
    states[2] = 1.0
    outputs = []
    for accepted in (1, 2):
        out, count = torch.empty(1, 1, 1), torch.tensor([accepted], dtype=torch.int32)
        bounds = torch.tensor([0, 1], dtype=torch.int32)
        common_args = (ones[0], None, torch.zeros(1, 1), False, slots, slots, 0, out, count, bounds)
        ops.selective_state_update_cpu(states.clone(), ones, ones, -ones, ones, ones, *common_args)
        outputs.append(out)
    return torch.equal(*outputs)
