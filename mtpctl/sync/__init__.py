"""Weight updates from the trainer to engines and log-prob replicas; `update.py` describes an update and draws its states.

No engine is named here. Each engine's package implements an `EngineClient`.
"""
