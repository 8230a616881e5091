"""The trainer process: actor, Megatron engine, microbatches, objectives, optimizer, weight sending.

Log-prob ranks use the same engine for scoring.
"""

from mtpctl.compat import megatron_core

megatron_core.skip_compilation()
