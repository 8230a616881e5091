"""The server's counters in Prometheus' text format."""

from __future__ import annotations

from mtpctl.logprob.server import LogprobServer


def prometheus(server: LogprobServer) -> str:
    """Every metric with its help and type."""
    counters = server.counters
    rows: list[tuple[str, str, str, float]] = [
        ("requests_total", "counter", "Sequences answered.", counters.requests),
        ("failed_total", "counter", "Sequences that ended in an error.", counters.failed),
        ("refused_total", "counter", "Sequences refused because the queue was full.", counters.refused),
        ("tokens_total", "counter", "Tokens of the forward passes.", counters.tokens),
        ("batches_total", "counter", "Forward passes.", counters.batches),
        ("retried_total", "counter", "Sequences that were given out once more after a pass failed.", counters.retried),
        ("replica_restarts_total", "counter", "Replicas replaced after they died.", server.replicas.restarts),
        ("updates_total", "counter", "Weight updates taken in.", counters.updates),
        ("busy_seconds_total", "counter", "Replica seconds in forward passes.", counters.busy_s),
        ("request_seconds_total", "counter", "Seconds from submission to answer, over all sequences.", counters.wait_s),
        ("stall_seconds_total", "counter", "Seconds that serving stood still for weight updates.", counters.stall_s),
        ("queue_tokens", "gauge", "Tokens that wait.", server.queue.tokens),
        ("queue_requests", "gauge", "Sequences that wait.", server.queue.requests),
        ("queue_limit_tokens", "gauge", "Tokens that may wait.", server.limits.queue_tokens),
        ("replicas_alive", "gauge", "Replicas that serve.", len(server.replicas.live())),
        ("replicas", "gauge", "Replicas there should be.", len(server.replicas.seats)),
        ("version", "gauge", "Current weight version.", server.version),
    ]
    lines = []
    for name, kind, text, value in rows:
        full = f"mtpctl_logprob_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {value}"]
    return "\n".join(lines) + "\n"
