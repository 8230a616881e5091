"""Ray: the cluster of a run, and waiting for its actors."""

from mtpctl.cluster.deadlines import within
from mtpctl.cluster.local import cluster

__all__ = ["cluster", "within"]
