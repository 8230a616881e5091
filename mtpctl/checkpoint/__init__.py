"""Checkpoints: sharded saving and restoring through megatron-core, selection of the newest one, and copies in object storage."""
