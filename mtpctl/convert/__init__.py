"""Conversion between Hugging Face folders and Megatron modules or checkpoints, by one mapping."""

from mtpctl.compat import megatron_core

megatron_core.skip_compilation()
