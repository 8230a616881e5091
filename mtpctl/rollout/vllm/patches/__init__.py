"""What vLLM does otherwise than it is needed here, put right at run time; each patch is guarded by the pinned release."""
