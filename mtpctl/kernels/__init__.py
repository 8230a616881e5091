"""Kernels. Most modules have the portable and the Triton version of a kernel, and the function that dispatches between them.

The LM-head kernels compute log-probs and losses from hidden states and the LM head without materializing all logits:

- `linear_logprob`: per-token log-probs, entropy, greedy hits and top k
- `linear_policy_loss`: a policy loss and its gradients in one pass, and the losses of drafts that learn from the same logits
- `linear_draft_loss`: the loss of a single draft
- `candidate_loss`: losses on the probabilities of a few named entries per token

All accept a vocab-sharded head. The first three share the `Backend` protocol.
"""
