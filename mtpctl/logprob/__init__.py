"""The log-prob server, which recomputes old log-probs while generation continues: scheduler, replicas, HTTP routes.

The server runs in the controller without torch; its ranks (`rank`) are processes that each run the trainer's engine.
"""
