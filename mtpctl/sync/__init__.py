"""How weights travel: publisher, sender and version store at the trainer's end, matching of names and receivers at the other.
Knows no engine: each takes its weights in behind an `EngineClient` of its own.
"""
