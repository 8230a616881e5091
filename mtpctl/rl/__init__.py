"""Reinforcement learning: advantages, losses and corrections as pure functions on tensors, and reward functions in worker processes.

Losses and metrics are sums. They are accumulated over microbatches and ranks, and divided once by the counts of the whole batch.
`rewards` imports no torch, because it runs in the controller.
"""
