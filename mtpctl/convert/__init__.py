"""Conversion between Hugging Face folders and Megatron modules or checkpoints, with one mapping for all of them."""

from mtpctl.compat import megatron_core

megatron_core.skip_compilation()
