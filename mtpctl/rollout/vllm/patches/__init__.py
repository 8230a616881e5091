"""Changes to vLLM's behaviour, made at run time; each patch is guarded by the pinned release."""
