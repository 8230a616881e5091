"""What runs in a trainer process: the actor, the Megatron engine with its micro-batches and updates, objectives, optimizer, sending.
Log-prob ranks hold the same engine, to score.
"""

from mtpctl.compat import megatron_core

megatron_core.skip_compilation()
