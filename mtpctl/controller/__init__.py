"""The asynchronous training loop: stages, sample buffer, admission by staleness, weight sync, resume and restarts.

Runs in the `mtpctl train` process, and calls trainers, engines and log-prob servers. Imports torch only to check a user-defined objective.
"""
