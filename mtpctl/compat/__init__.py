"""Stand-ins for the behaviour of torch, transformers, Megatron-core and Megatron-Bridge, each guarded by version or shape.
What is done to an engine lies in that engine's package under `rollout`.
"""
