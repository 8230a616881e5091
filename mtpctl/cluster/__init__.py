"""Ray: the cluster of a run, waiting for its actors, and replicas that die and come back; and where processes meet."""
