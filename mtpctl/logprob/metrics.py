"""The server's counters in Prometheus' text format."""

from __future__ import annotations

from mtpctl.logprob.server import LogprobServer
from mtpctl.web.prometheus import Series, text_of


def prometheus(server: LogprobServer) -> str:
    """Every metric with its help and type."""
    counters = server.counters
    series = [
        Series("requests_total", "counter", "Sequences answered.", counters.requests),
        Series("failed_total", "counter", "Sequences that ended in an error.", counters.failed),
        Series("refused_total", "counter", "Sequences refused because the queue was full.", counters.refused),
        Series("tokens_total", "counter", "Tokens of the forward passes.", counters.tokens),
        Series("batches_total", "counter", "Forward passes.", counters.batches),
        Series("retried_total", "counter", "Sequences that were given out once more after a pass failed.", counters.retried),
        Series("replica_restarts_total", "counter", "Replicas replaced after they died.", server.replicas.restarts),
        Series("updates_total", "counter", "Weight updates taken in.", counters.updates),
        Series("busy_seconds_total", "counter", "Replica seconds in forward passes.", counters.busy_s),
        Series("request_seconds_total", "counter", "Seconds from submission to answer, over all sequences.", counters.wait_s),
        Series("stall_seconds_total", "counter", "Seconds that serving stood still for weight updates.", counters.stall_s),
        Series("queue_tokens", "gauge", "Tokens that wait.", server.queue.tokens),
        Series("queue_requests", "gauge", "Sequences that wait.", server.queue.requests),
        Series("queue_limit_tokens", "gauge", "Tokens that may wait.", server.limits.queue_tokens),
        Series("replicas_alive", "gauge", "Replicas that serve.", len(server.replicas.live())),
        Series("replicas", "gauge", "Replicas there should be.", len(server.replicas.slots)),
        Series("version", "gauge", "Current weight version.", server.version),
    ]
    return text_of("mtpctl_logprob_", series)
