"""The asynchronous training loop: stages, sample buffer, admission by staleness, weight sync, resume and restarts.

Runs in the `mtpctl train` process. Calls trainers, engines and log-prob servers; does not import torch.
"""
