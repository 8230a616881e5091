"""The asynchronous loop: stages, sample buffer, admission by staleness, publishing of weights, resume, supervision.
Runs in the process of `mtpctl train`; calls trainers, engines and log-prob servers, and imports no torch.
"""
