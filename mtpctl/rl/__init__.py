"""The arithmetic of reinforcement learning: pure functions on tensors, and the checkers that give rewards.

Losses and metrics come as sums, so that micro-batches, data-parallel and context-parallel ranks can be added up and
divided once, by counts of the whole batch. `rewards` and `groups` need no torch: they run in the controller.
"""
