"""Ray: the cluster of a run, waiting for its actors, and replicas that die and come back."""

from mtpctl.cluster.deadlines import within
from mtpctl.cluster.local import cluster
from mtpctl.cluster.replicas import Lifecycle, Replicas, Seat, start_all

__all__ = ["Lifecycle", "Replicas", "Seat", "cluster", "start_all", "within"]
