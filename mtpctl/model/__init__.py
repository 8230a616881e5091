"""Megatron modules: process groups, transformer config, layer specs, packed attention, the MTP head.

Used by trainer ranks, log-prob ranks and offline conversion.
"""

from mtpctl.compat import megatron_core

megatron_core.skip_compilation()
