"""Megatron modules: transformer config, layer specs, packed attention, the MTP head."""
