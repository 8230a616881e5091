"""Kernels: each module has one kernel's portable and Triton versions and the function that dispatches between them.

Log-probs and losses straight from hidden states and the LM head, without materializing the logits, share one `Backend`: `linear_logprob`
returns per-token log-probs, entropy, greedy hits and top k; `linear_policy_loss` a policy loss with its gradients in one pass, and the
losses of drafts that learn from the same logits; `linear_draft_loss` such a draft loss alone. All accept a vocab-sharded head.
"""
