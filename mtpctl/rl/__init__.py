"""The arithmetic of reinforcement learning: pure functions on tensors, and the checkers that give rewards.

Losses and metrics come as sums, so that micro-batches, data-parallel and context-parallel ranks can be added up and
divided once, by counts of the whole batch. Names load on first use: the reward checkers need no torch.
"""
