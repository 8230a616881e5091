"""The log-prob server: old log-probs from ranks of their own, beside generation; scheduler, replicas, manager, HTTP face.
The server runs beside the controller without torch, its ranks (`rank`) in processes that each hold an engine of the trainer's.
"""
