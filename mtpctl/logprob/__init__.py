"""The log-prob server: old log-probs from ranks of their own, beside generation; scheduler, replicas, manager, HTTP face."""
