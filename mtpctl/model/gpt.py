"""The language model with its MTP head, without the LM head's product.

megatron-core's `GPTModel` multiplies by the LM head in `forward`, passes MTP the state after the final norm, and computes MTP's loss. This
model returns hidden states instead. `mtpctl.trainer` computes log-probs and losses of the trunk and every MTP depth from them, so
the logits are never materialized all at once, and the model needs no labels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import VocabParallelEmbedding as UpstreamVocabParallelEmbedding
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region, reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch import Tensor

from mtpctl.kernels.products import is_buffered
from mtpctl.model.attention import LatentAttention
from mtpctl.model.layers import RMSNorm
from mtpctl.model.packing import EarlierDepths, Packing
from mtpctl.model.rope import Rope, Rotary

if TYPE_CHECKING:
    from mtpctl.model.drafters import BlockDrafter, BoundaryStates


@dataclass
class Hidden:
    """Output of the last pipeline stage for this rank's t tokens: `Packing.tokens`, split over tp with sequence parallelism.

    trunk: [t, H], the state after the final norm, which the LM head reads. head: [vocab / tp, H], this rank's rows of the LM head. mtp: one
    [t, H] per depth; empty if MTP was not requested.
    """

    trunk: Tensor
    head: Tensor
    mtp: list[Tensor] = field(default_factory=list)


class VocabParallelEmbedding(UpstreamVocabParallelEmbedding):
    """Ids [1, T] → [1, T, H], or [t, 1, H] with sequence parallelism. Megatron-Bridge maps its parameter by the name of the class.

    Adds its gradient to the weight's fp32 buffer row by row. Autograd would allocate, zero and add a gradient of the whole weight, which
    for a large vocabulary takes longer than a layer's attention.
    """

    def forward(self, input_: Tensor) -> Tensor:
        weight, ids, is_remote = self.weight, input_, None
        if not is_buffered(weight):
            return super().forward(input_)
        if self.tp_group.size() > 1:
            is_remote = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
            ids = (input_ - self.vocab_start_index).masked_fill(is_remote, 0)
        rows: Tensor = _EmbeddingRows.apply(weight, ids, is_remote)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(rows.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(rows, group=self.tp_group) if is_remote is not None else rows


class _EmbeddingRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, is_remote: Tensor | None) -> Tensor:
        ctx.save_for_backward(ids, is_remote)
        ctx.weight = weight  # a parameter, which outlives the graph
        rows = torch.nn.functional.embedding(ids, weight)
        return rows if is_remote is None else rows.masked_fill(is_remote.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ids, is_remote = ctx.saved_tensors
        buffer: Tensor = ctx.weight.main_grad
        grad = grads[0].to(buffer.dtype)
        if is_remote is not None:
            grad = grad.masked_fill(is_remote.unsqueeze(-1), 0.0)
        # Unlike `index_add_`, this adds rows of equal ids in a fixed order on CUDA as well.
        buffer.index_put_((ids.flatten(),), grad.flatten(0, -2), accumulate=True)
        return None, None, None


class MtpLayer(MultiTokenPredictionLayer):
    """Norms, projection, transformer layer and final norm of one MTP depth.

    Depth k combines the state at token i with the embedding of token i + k; its output predicts token i + k + 1 (DeepSeek-V3 report, arXiv
    2412.19437, section 2.2). Upstream shifts token ids sample by sample in Python; here `MtpModel` shifts a whole microbatch at once.

    passes_prenorm: whether the next depth reads the state before this depth's final norm rather than after it (set per model family).
    """

    passes_prenorm: bool = False

    def forward(  # type: ignore[override]
        self, hidden: Tensor, embedding: Tensor, packing: Packing, padding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """hidden and embedding [T, 1, H] (split over tp with sequence parallelism) → states for the LM head and for the next depth."""
        # All depths of a repeated layer append to one list of keys; recomputation would append them twice.
        recompute = self.config.recompute_granularity == "full" and self.training and packing.earlier is None
        if recompute and not hidden.requires_grad:
            # A checkpointed region without a differentiable input would give its parameters no gradient.
            hidden = hidden.detach().requires_grad_()
        run = self._checkpointed_forward if recompute else self._proj_and_transformer_layer
        out = run(hidden_states=hidden, decoder_input=embedding, packed_seq_params=packing, padding_mask=padding)
        return out if self.passes_prenorm else (out, out)

    def _postprocess(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        normed: Tensor = super()._postprocess(hidden_states)
        return (normed, hidden_states) if self.passes_prenorm else normed


class MtpModel(GPTModel):
    """`GPTModel` whose last stage returns `Hidden`.

    Attributes:
        mtp_reads_prenorm: the MTP head reads the trunk's state before the final norm (MiMo) instead of after it (DeepSeek).
        mtp_masks_first_embedding: MTP layers read 0 instead of the embedding at position 0; a repeated layer only at its first depth.
        mtp_isolated: detach all embeddings, and the state at the first depth. Gradients still flow through the depths.
        boundary_states: the states that an EAGLE-3 or DFlash drafter reads.
        block_drafter: a DFlash drafter.
    """

    mtp_reads_prenorm: bool = False
    mtp_masks_first_embedding: bool = True
    mtp_isolated: bool = True
    boundary_states: BoundaryStates | None = None
    block_drafter: BlockDrafter | None = None
    rope: Rope | None = None
    window_rope: Rope | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._prenorm: Tensor | None = None
        # MTP needs the state before the final norm, so the norm belongs to the LM head's stage. Upstream puts it on the stage of the last
        # decoder layer.
        if not self.post_process:
            self.decoder.final_layernorm = None
        elif self.decoder.final_layernorm is None:
            self.decoder.final_layernorm = RMSNorm(self.config, self.config.hidden_size, self.config.layernorm_epsilon)
        if self.pre_process or self.mtp_process:
            # Upstream's model constructs its embedding regardless of the spec.
            self.embedding.word_embeddings.__class__ = VocabParallelEmbedding
        if self.mtp_process and self.share_embeddings_and_output_weights and not self.pre_process:
            # With tied weights, MTP's embedding on the last stage is also the LM head; upstream allocates a second weight.
            del self.output_layer.weight
            self.output_layer.__dict__["weight"] = self.embedding.word_embeddings.weight
        if self.mtp_process:
            self.decoder.final_layernorm.register_forward_pre_hook(self._save_prenorm)

    def use_rope(self, rope: Rope | None, window_rope: Rope | None = None) -> None:
        """Use `rope` in every attention layer, except in window layers if `window_rope` is set."""
        self.rope, self.window_rope = rope, window_rope
        for module in self.modules():
            if isinstance(module, LatentAttention) and rope is not None:
                module.use_rope(rope)

    def _save_prenorm(self, _: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        self._prenorm = args[0]

    def forward(self, input_ids: Tensor, packing: Packing, *, depths: int = 0) -> Hidden | Tensor:  # type: ignore[override]
        """input_ids [T] of the whole packed sequence → `Hidden` on the last pipeline stage, hidden states [t, 1, H] on others.

        depths: number of MTP depths to compute; with 0, the MTP head is not used.
        """
        position_ids = packing.position_ids
        packing.rotary, packing.window_rotary = self._rotary(position_ids), self._window_rotary(position_ids)
        embeddings = self._embed(input_ids[packing.tokens], position_ids) if self.pre_process else None
        padding = self._router_padding_mask(packing)
        collector = self.boundary_states if depths else None
        try:
            if collector is not None:
                collector.begin()
            state = self.decoder(hidden_states=embeddings, attention_mask=None, packed_seq_params=packing, padding_mask=padding)
            prenorm, boundary_states = self._prenorm, None if collector is None else collector.states()
        finally:
            # Otherwise the states of a pass that failed would stay in memory until the next pass has computed its own.
            self._prenorm = None
            if collector is not None:
                collector.end()
        if not self.post_process:
            return state
        head = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight
        mtp: list[Tensor] = []
        if depths and self.block_drafter is not None:
            assert boundary_states is not None
            mtp = self._draft_block(self.block_drafter, boundary_states, input_ids, packing, depths)
        elif depths:
            trunk_state = prenorm if self.mtp_reads_prenorm else state
            if boundary_states is not None:
                trunk_state = self.mtp.layers[0].project(boundary_states)
            assert trunk_state is not None
            mtp = self._run_mtp(trunk_state, input_ids, packing, depths)
        return Hidden(trunk=state.squeeze(1), head=head, mtp=[depth.squeeze(1) for depth in mtp])

    def _embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.embedding(input_ids=input_ids[None], position_ids=position_ids[None])

    def _rotary(self, position_ids: Tensor) -> Rotary | None:
        return None if self.rope is None or self.config.multi_latent_attention else self.rope.rotary(position_ids)

    def _window_rotary(self, position_ids: Tensor) -> Rotary | None:
        return None if self.window_rope is None else self.window_rope.rotary(position_ids)

    def _run_mtp(self, state: Tensor, input_ids: Tensor, packing: Packing, depths: int) -> list[Tensor]:
        """States of the first `depths` depths, as inputs of the LM head.

        Separate layers use their tokens' positions and attend to their own keys. A repeated layer works as in an engine that drafts several
        tokens with it: each depth uses the next position and attends to the first depth's keys of earlier tokens.
        """
        layers, position_ids = self.mtp.layers, packing.position_ids
        state = state.detach() if self.mtp_isolated and self.boundary_states is None else state
        repeated = len(layers) == 1 and depths > 1
        earlier = EarlierDepths()
        states = []
        for depth in range(depths):
            input_ids = packing.shift(input_ids)
            embeddings = self._embed(input_ids[packing.tokens], position_ids)
            embeddings = embeddings.detach() if self.mtp_isolated else embeddings
            if self.mtp_masks_first_embedding and (depth == 0 or not repeated):
                is_first = self._sequence_shard(position_ids == 0)
                embeddings = embeddings.masked_fill(is_first[:, None, None], 0.0)
            depth_packing = packing
            if repeated:
                positions = position_ids + depth
                depth_packing = packing.at_depth(positions, self._rotary(positions), earlier, self._window_rotary(positions))
            head_state, state = layers[min(depth, len(layers) - 1)](state, embeddings, depth_packing, self._router_padding_mask(packing))
            states.append(head_state)
        return states

    def _draft_block(
        self, drafter: BlockDrafter, boundary_states: Tensor, input_ids: Tensor, packing: Packing, num_drafts: int
    ) -> list[Tensor]:
        """States of a block of `num_drafts` drafts, as inputs of the LM head.

        A block begins at every token i: the engine has then sampled token i + 1. The block's inputs are that token and `num_drafts` mask
        tokens, at the positions from i + 1 on. The mask at token i + 1 + k drafts that token, like depth k of MTP layers.
        """
        positions = packing.position_ids
        sampled = packing.shift(input_ids)[packing.tokens]
        masks = torch.full_like(sampled, drafter.mask_token)
        token, mask = (self._embed(ids, positions).detach() for ids in (sampled, masks))
        rotary = [self._rotary(positions + 1 + offset) for offset in range(num_drafts + 1)]
        return drafter(boundary_states, [token, *[mask] * num_drafts], rotary, packing)

    def _router_padding_mask(self, packing: Packing) -> Tensor | None:
        """Mask of local tokens excluded from router losses and load statistics."""
        return None if packing.padding_mask is None or self.config.num_moe_experts is None else self._sequence_shard(packing.padding_mask)

    def _sequence_shard(self, values: Tensor) -> Tensor:
        """This rank's shard of per-token values under sequence parallelism."""
        if not self.config.sequence_parallel:
            return values
        tp = self.pg_collection.tp
        return values.chunk(tp.size())[tp.rank()]
