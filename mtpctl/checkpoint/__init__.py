"""Checkpoints on disk: sharded saving and restoring through megatron-core, and which one of a folder is the newest.
Used in trainer processes and by offline conversion; knows nothing of either.
"""
