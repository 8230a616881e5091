"""Log-probs of given labels straight from hidden states and the LM head, without the logits in memory.

`linear_logprob` gives per-token log-probs, entropy, greedy hits and the top k; `linear_policy_loss` gives a policy loss and its
gradients in one pass, and the losses of drafts that learn from the same logits; `linear_draft_loss` gives such a loss by itself. All take
vocab-sharded heads (tensor parallel) and run on CPU and CUDA; `implementation` chooses how.
"""
