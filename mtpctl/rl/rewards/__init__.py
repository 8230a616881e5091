"""Rewards: a user-defined or built-in function of a response, run in worker processes (`pool`).

Nothing here imports torch. The workers do not import Ray, transformers or pydantic either.
"""
