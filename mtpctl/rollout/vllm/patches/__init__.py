"""Patches of vLLM, applied at run time. Each patch checks the installed release."""
