"""The log-prob server: recomputes old log-probs while generation continues. Scheduler, replicas, HTTP routes.
The server runs in the controller without torch; its ranks (`rank`) are processes that each run the trainer's engine.
"""
