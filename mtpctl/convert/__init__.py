"""Hugging Face folders and Megatron modules, both ways, through one mapping; and offline conversion of whole checkpoints.
Runs in trainer processes, log-prob servers and `mtpctl convert-hf`.
"""

from mtpctl.compat import megatron_core

megatron_core.skip_compilation()
