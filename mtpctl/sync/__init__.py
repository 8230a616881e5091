"""How weights travel from the trainer to engines and log-prob replicas. `update.py` has the whole way, with a picture.

No engine is named here: each receives its weights behind an `EngineClient` in its own package.
"""
