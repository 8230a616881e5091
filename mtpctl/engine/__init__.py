"""Megatron at work: process groups, packed micro-batches, updates, log-probs, export."""
