"""Ray: the cluster of a run, waiting for its actors, replicas that die and come back, and where processes meet.
Any process may import it; `meeting` alone needs torch.
"""
