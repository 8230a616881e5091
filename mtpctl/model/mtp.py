"""One multi-token-prediction layer on packed sequences.

Depth k combines the state at token i with the embedding of token i + k, and its output predicts token i + k + 1
(DeepSeek-V3 report, arXiv 2412.19437, section 2.2). Upstream's layer shifts token ids itself, sample by sample in
Python; this one is handed the embeddings, shifted once for the whole micro-batch.
"""

from __future__ import annotations

from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch import Tensor

from mtpctl.model.packing import Packing


class MtpLayer(MultiTokenPredictionLayer):
    """Norms, projection, transformer layer and final norm of one depth.

    `recycles_prenorm` belongs to the family: whether the next depth reads the state before this one's final norm, or after it.
    """

    recycles_prenorm: bool = False

    def forward(  # type: ignore[override]
        self, hidden: Tensor, embedding: Tensor, packing: Packing, padding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """hidden and embedding [T, 1, H] (split over tp in sequence-parallel mode) → of the same shape, the state that the LM head
        reads, and the one that the next depth reads."""
        # The depths of a repeated layer share keys, which a region that is computed again would not.
        recompute = self.config.recompute_granularity == "full" and self.training and packing.earlier is None
        if recompute and not hidden.requires_grad:
            # A checkpointed region without a differentiable input would give its parameters no gradient.
            hidden = hidden.detach().requires_grad_()
        run = self._checkpointed_forward if recompute else self._proj_and_transformer_layer
        found = run(hidden_states=hidden, decoder_input=embedding, packed_seq_params=packing, padding_mask=padding)
        return found if self.recycles_prenorm else (found, found)

    def _postprocess(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        read: Tensor = super()._postprocess(hidden_states)
        return (read, hidden_states) if self.recycles_prenorm else read
