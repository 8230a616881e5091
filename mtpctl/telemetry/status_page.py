"""The status page of a run that goes on, as HTML without scripts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from mtpctl.telemetry.history import Event
from mtpctl.telemetry.live import LiveStatus
from mtpctl.telemetry.names import describe, format_duration, format_value
from mtpctl.telemetry.page import page


@dataclass(frozen=True)
class ReplicaCounts:
    """How many rollout replicas serve, how many are asked for, and how many were restarted after a failure.

    least and most: the bounds on the number (`rollout.replicas`), which are equal where the recipe has a plain number.
    """

    serving: int
    asked: int
    least: int
    most: int
    restarts: int

    def told(self) -> str:
        """In words: `2 of 3 (1 to 4) serve, 0 started anew`."""
        bounds = "" if self.least == self.most else f" ({self.least} to {self.most})"
        return f"{self.serving} of {self.asked}{bounds} serve, {self.restarts} started anew"


def render(live: LiveStatus, replicas: ReplicaCounts | None) -> str:
    """The page as HTML. `replicas`: None before the engines are started."""
    found = live.overview()
    of = "" if found.steps is None else f" of {found.steps}"
    facts = [
        ("state", "; ".join(live.waiting) or found.state),
        ("stage", found.stage or "–"),
        ("step", f"{found.step}{of}" if found.stage else "–"),
        ("reward", "–" if found.reward is None else format_value(found.reward, "number")),
        ("reward, unfiltered", "–" if found.unfiltered_reward is None else format_value(found.unfiltered_reward, "number")),
        ("held-out accuracy", "–" if found.accuracy is None else format_value(found.accuracy, "share")),
        ("newest row", f"{format_duration(found.age_s)} ago"),
        ("rollout replicas", "–" if replicas is None else replicas.told()),
        ("last restart", found.restarts[-1] if found.restarts else "none"),
    ]
    metrics = ((name, format_value(value, describe(name).unit), describe(name).meaning) for name, value in sorted(live.metrics.items()))
    trouble, events = live.trouble(), list(live.events)
    parts = [
        _table((), facts),
        _events("Newest errors", trouble) if trouble else "",
        _events("Newest events", events),
        f"<h2>Metrics</h2>{_table(('metric', 'newest', ''), metrics)}" if live.metrics else "",
    ]
    return page(live.path.name, str(live.path), "".join(parts), "/status.json · /metrics for Prometheus")


def _events(title: str, events: Sequence[Event]) -> str:
    rows = ((time.strftime("%m-%d %H:%M:%S", time.localtime(event.time)), event.kind, event.message) for event in reversed(events))
    return f"<h2>{title}</h2>{_table(('time', 'kind', ''), rows)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    above = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f'<table class="left">{above}<tbody>{body}</tbody></table>'
