"""Hugging Face folders and Megatron modules, both ways, through one mapping."""
