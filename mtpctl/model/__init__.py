"""Megatron modules: process groups, transformer config, layer specs, packed attention, the MTP head.
Runs wherever a model is held: trainer ranks, log-prob ranks, offline conversion.
"""

from mtpctl.compat import megatron_core

megatron_core.skip_compilation()
