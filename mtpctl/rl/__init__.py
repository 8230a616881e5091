"""The arithmetic of reinforcement learning: pure functions on tensors; and rewards, in processes of their own.

Losses and metrics are returned as sums, which are added up over micro-batches and ranks and divided once, by counts of the whole batch.
`rewards`, `groups` and `overlong` need no torch: they run in the controller.
"""
