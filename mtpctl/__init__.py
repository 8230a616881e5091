"""Asynchronous RL post-training for language models that carry multi-token-prediction heads."""
