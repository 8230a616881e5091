"""The language model with its MTP head, stopping at hidden states.

megatron-core's `GPTModel` multiplies by the LM head inside `forward`, feeds MTP the state after the final norm, and
computes MTP's loss on the way. Here the model ends before the head: the engine takes log-probs straight from hidden
states, for the trunk and for every MTP depth alike, so that logits never exist and `labels` are not the model's concern.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from mtpctl.model.draft_attention import EarlierDepths
from mtpctl.model.embedding import VocabParallelEmbedding
from mtpctl.model.latent import LatentAttention
from mtpctl.model.layers import RMSNorm
from mtpctl.model.packing import Packing
from mtpctl.model.rope import Rope, Rotary


@dataclass
class Hidden:
    """What the last pipeline stage returns, for the t tokens of this rank: `Packing.tokens`, and with sequence parallelism split over
    tp as well.

    trunk: [t, H], the state after the final norm, which the LM head reads.
    mtp: one [t, H] a depth; empty where MTP was not asked for.
    head: [vocab / tp, H], this rank's rows of the LM head.
    """

    trunk: Tensor
    head: Tensor
    mtp: list[Tensor] = field(default_factory=list)


class MtpModel(GPTModel):
    """`GPTModel` whose last stage returns `Hidden`.

    Two attributes say what belongs to the family: `mtp_reads_prenorm` (MiMo's head reads the trunk's state before the
    final norm, DeepSeek's after it), and `mtp_blanks_first` (whether the first depth reads 0 in place of the embedding at
    position 0). One says what the recipe wants: `mtp_isolated` detaches the trunk's state and the embeddings where they enter
    the first depth, and nowhere else, so that gradients flow along the chain of depths.
    """

    mtp_reads_prenorm: bool = False
    mtp_blanks_first: bool = True
    mtp_isolated: bool = True
    rope: Rope

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._prenorm: Tensor | None = None
        # Upstream puts the final norm where the last decoder layer is; the state before it is wanted where the head is.
        if not self.post_process:
            self.decoder.final_layernorm = None
        elif self.decoder.final_layernorm is None:
            self.decoder.final_layernorm = RMSNorm(self.config, self.config.hidden_size, self.config.layernorm_epsilon)
        if self.pre_process or self.mtp_process:
            # Upstream's model makes its embedding itself, whatever the spec says.
            self.embedding.word_embeddings.__class__ = VocabParallelEmbedding
        if self.mtp_process and self.share_embeddings_and_output_weights and not self.pre_process:
            # The head is the embedding that MTP brings to the last stage; upstream allocates another one beside it.
            del self.output_layer.weight
            self.output_layer.__dict__["weight"] = self.embedding.word_embeddings.weight
        if self.mtp_process:
            self.decoder.final_layernorm.register_forward_pre_hook(self._keep_prenorm)

    def use_rope(self, rope: Rope) -> None:
        """Have queries and keys rotated by this embedding, in every attention layer."""
        self.rope = rope
        for module in self.modules():
            if isinstance(module, LatentAttention):
                module.use_rope(rope)

    def _keep_prenorm(self, _: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        self._prenorm = args[0]

    def forward(self, input_ids: Tensor, packing: Packing, *, depths: int = 0) -> Hidden | Tensor:  # type: ignore[override]
        """input_ids [T], the whole row → `Hidden` on the last pipeline stage, the stage's state [t, 1, H] on the others.

        depths: how many MTP depths to compute; 0 leaves the head's weights untouched by the pass.
        """
        position_ids = packing.position_ids
        packing.rotary = self._rotary(position_ids)
        embedded = self._embed(input_ids[packing.tokens], position_ids) if self.pre_process else None
        padding = self._padding(packing)
        state = self.decoder(hidden_states=embedded, attention_mask=None, packed_seq_params=packing, padding_mask=padding)
        if not self.post_process:
            return state
        prenorm, self._prenorm = self._prenorm, None
        head = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight
        mtp: list[Tensor] = []
        if depths:
            trunk_state = prenorm if self.mtp_reads_prenorm else state
            assert trunk_state is not None
            mtp = self._mtp(trunk_state, input_ids, packing, depths)
        return Hidden(trunk=state.squeeze(1), head=head, mtp=[depth.squeeze(1) for depth in mtp])

    def _embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.embedding(input_ids=input_ids[None], position_ids=position_ids[None])

    def _rotary(self, position_ids: Tensor) -> Rotary | None:
        return None if self.config.multi_latent_attention else self.rope.rotary(position_ids)

    def _mtp(self, state: Tensor, input_ids: Tensor, packing: Packing, depths: int) -> list[Tensor]:
        """States of the first `depths` depths, as the LM head reads them.

        Layers of their own stand at their tokens' positions and attend to their own keys. A repeated layer is what an engine drafts
        several tokens with: every depth stands a position further on, and sees what the first depth left of earlier tokens.
        """
        layers, position_ids = self.mtp.layers, packing.position_ids
        state = state.detach() if self.mtp_isolated else state
        repeated = len(layers) == 1 and depths > 1
        earlier = EarlierDepths()
        states = []
        for depth in range(depths):
            input_ids = packing.shift(input_ids)
            embedded = self._embed(input_ids[packing.tokens], position_ids)
            embedded = embedded.detach() if self.mtp_isolated else embedded
            if self.mtp_blanks_first and (depth == 0 or not repeated):
                embedded = self._blank_first(embedded, position_ids)
            here = packing.moved(position_ids + depth, self._rotary(position_ids + depth), earlier) if repeated else packing
            read, state = layers[min(depth, len(layers) - 1)](state, embedded, here, self._padding(packing))
            states.append(read)
        return states

    def _blank_first(self, embedded: Tensor, position_ids: Tensor) -> Tensor:
        first = self._of_sequence(position_ids == 0)
        return embedded.masked_fill(first[:, None, None], 0.0)

    def _padding(self, packing: Packing) -> Tensor | None:
        """Which of this rank's tokens routers leave out of their losses and loads."""
        return None if packing.padding is None or self.config.num_moe_experts is None else self._of_sequence(packing.padding)

    def _of_sequence(self, values: Tensor) -> Tensor:
        """The values, one a token, of those tokens that sequence parallelism gives to this rank."""
        if not self.config.sequence_parallel:
            return values
        tp = self.pg_collection.tp
        return values.chunk(tp.size())[tp.rank()]
