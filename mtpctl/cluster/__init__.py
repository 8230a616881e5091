"""Ray: the cluster of a run, deadlines of actors, supervision of replicas, rendezvous of processes. Only `rendezvous` needs torch."""
