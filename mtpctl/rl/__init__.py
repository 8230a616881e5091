"""The arithmetic of reinforcement learning: pure functions on tensors, and the checkers that give rewards.

Losses and metrics are returned as sums, which are added up over micro-batches and ranks and divided once, by counts of the whole batch.
`rewards` and `groups` need no torch: they run in the controller.
"""
