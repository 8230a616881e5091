"""Ray: the cluster of a run, deadlines for its actors, replicas that are restarted, and the rendezvous of processes.
Every process may import it; only `meeting` needs torch.
"""
