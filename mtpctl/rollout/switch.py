"""Chooses the number of draft tokens per step by measuring the current load.

A step with k draft tokens takes a time `t(k)`, which depends on the batch size, and yields `1 + a(1) + … + a(k)` tokens per request, where
`a(i)` is the acceptance of the draft at position i. Both are measured while requests are served: the acceptance in every step that
verifies drafts, the time of another k by trying it for a few steps. The choice is the k with the highest `(1 + a(1) + … + a(k)) / t(k)`;
with a limit of 1 it switches speculation on or off. Before times are measured, a draft is assumed to add `PRIOR` of a step, so an engine
whose drafts are never accepted does not draft. Effects that slow the current steps, such as longer contexts and a busy host, are assumed
to slow steps with other k by the same factor.

A look is one round of trying all k. Trying a slower k costs throughput. `LOSS_SHARE` limits this cost to a share of all steps, except for
the first look: after a look that cost the work of n steps, the next one is due n / `LOSS_SHARE` steps later. Until the limit permits a
look, an unmeasured load uses the times of the nearest measured load.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

SETTLE = 6
"""Steps after a change that are not timed: steps in flight have the old number of drafts, and CUDA graphs warm up."""
WINDOW = 16
"""Timed steps per try."""
PRIOR = 0.05
"""Assumed cost of a draft before it is measured, as a share of a step."""
MIN_VERIFIED = 256
"""Request-steps with verified drafts required to use the measured acceptance before the first look."""
LOSS_SHARE = 0.005
"""Maximum cost of looks, as a share of all steps."""
MARGIN = 0.01
"""The choice changes only if another number is faster by more than this share."""
DRIFT = 1.5
"""Maximum factor by which the number of requests may change during a look."""
MEMORY = 4096
"""Request-steps over which acceptance is averaged."""
AFTER_UPDATE = 256
"""Weight of the acceptance before a weight update, in request-steps."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: `requests` requests with `drafts` drafts each took `seconds`; `accepted[i]` of them accepted the draft at position i."""

    requests: int
    drafts: int
    seconds: float
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision for about `requests` requests; `tokens_per_s`: measured throughput by number of drafts."""

    requests: int
    drafts: int
    tokens_per_s: dict[int, float]

    def __str__(self) -> str:
        rates = ", ".join(f"{rate:,.0f} tokens/s with {drafts}" for drafts, rate in sorted(self.tokens_per_s.items()))
        return f"speculation: {self.drafts} draft tokens for about {self.requests} concurrent requests ({rates})"


@dataclass(slots=True)
class _Load:
    """Measurements for batch sizes up to one power of two."""

    times: dict[int, float] = field(default_factory=dict)
    """Seconds per step by number of drafts."""
    chosen: int | None = None


class SpeculationSwitch:
    """Call `drafts()` before each step and `observe(step)` after it. `report` receives every changed decision."""

    def __init__(self, limit: int, report: Callable[[Choice], None] = lambda choice: None) -> None:
        self.limit = limit
        self.looks = 0
        self.switches = 0
        self._report = report
        self._reset()

    def _reset(self) -> None:
        self._fixed: int | None = None
        self._current = self.limit
        self._loads: dict[int, _Load] = {}
        self._trying: deque[int] = deque()
        self._timed: list[Step] = []
        self._settling = SETTLE
        self._verified = [0.0] * self.limit
        self._accepted = [0.0] * self.limit
        self._steps = 0
        self._lost = 0.0
        self._first_loss: float | None = None
        self._look_at: float | None = None
        self._look_requests = 0
        self._tried = 0
        self._steady = 0
        self._last_load = -1

    # ------------------------------------------------------------------------------------------------- before a step

    def fix(self, drafts: int | None) -> None:
        """Use `drafts` without looking; None: automatic again, without previous measurements."""
        if drafts is not None and not 0 <= drafts <= self.limit:
            raise ValueError(f"from 0 to {self.limit} draft tokens are possible, got {drafts}")
        self._reset()
        self._fixed = drafts

    def look_again(self) -> None:
        """Discount the measured acceptance, which a weight update changes. Step times are kept.

        The previous acceptance counts as `AFTER_UPDATE` request-steps, and a look is due as soon as `LOSS_SHARE` permits.
        """
        for position, verified in enumerate(self._verified):
            keep = min(1.0, AFTER_UPDATE / verified) if verified else 1.0
            self._verified[position] *= keep
            self._accepted[position] *= keep
        self._look_at = self._steps

    def drafts(self) -> int:
        """Draft tokens of the next step."""
        return self._current if self._fixed is None else self._fixed

    @property
    def looking(self) -> bool:
        return bool(self._trying)

    # -------------------------------------------------------------------------------------------------- after a step

    def observe(self, step: Step) -> None:
        """Record a step in which all requests decoded."""
        self._count(step)
        if self._fixed is not None:
            return
        self._steps += 1
        load = _bucket(step.requests)
        self._steady = self._steady + 1 if load == self._last_load else 0
        self._last_load = load
        if self._trying:
            self._try(step, load)
            return
        known = self._loads.setdefault(load, _Load())
        self._follow(step, known)
        due = self._look_at is None or self._steps >= self._look_at
        allowed = self._first_loss is None or self._lost - self._first_loss <= LOSS_SHARE * self._steps
        if allowed and self._steady >= WINDOW and (due or known.chosen is None):
            self._begin(step.requests, known)
            return
        want = self._best(known.times, self._current) if len(known.times) == self.limit + 1 else self._nearest(load)
        self._use(want, step.requests, known)

    def _count(self, step: Step) -> None:
        for position in range(min(step.drafts, len(step.accepted), self.limit)):
            keep = max(0.0, 1 - step.requests / MEMORY)
            self._verified[position] = keep * self._verified[position] + step.requests
            self._accepted[position] = keep * self._accepted[position] + step.accepted[position]

    def _follow(self, step: Step, known: _Load) -> None:
        """Scale the times of all numbers of drafts by the current step time, since longer contexts slow all of them."""
        if self._settling:
            self._settling -= 1
        elif step.drafts == self._current and step.drafts in known.times and _usual(step, known):
            slower = 1 + (step.seconds / known.times[step.drafts] - 1) / (4 * WINDOW)
            known.times = {drafts: slower * seconds for drafts, seconds in known.times.items()}

    def _begin(self, requests: int, known: _Load) -> None:
        """Start a look: try all numbers of drafts, largest first, which measures the acceptance of all positions.

        After an aborted first look, only the numbers without times are tried.
        """
        self._look_requests, self._tried = requests, 0
        self._trying = deque(drafts for drafts in range(self.limit, -1, -1) if known.chosen is not None or drafts not in known.times)
        self._change(self._trying[0])

    def _try(self, step: Step, load: int) -> None:
        self._tried += 1
        if not 1 / DRIFT <= step.requests / self._look_requests <= DRIFT:
            self._abort_look(load)
            return
        if self._settling:
            self._settling -= 1
            return
        if step.drafts != self._trying[0]:
            return
        self._timed.append(step)
        if len(self._timed) < WINDOW:
            return
        known = self._loads.setdefault(_bucket(self._look_requests), _Load())
        known.times[step.drafts] = statistics.median(each.seconds for each in self._timed)
        self._timed.clear()
        self._trying.popleft()
        if self._trying:
            self._change(self._trying[0])
            return
        self._end(step.requests, known)

    def _abort_look(self, load: int) -> None:
        """Abort a look because the load changed. Its steps count as lost, except in the first look."""
        self._trying.clear()
        self._timed.clear()
        if self._first_loss is not None:
            self._lost += self._tried
        self._change(self._nearest(load))

    def _end(self, requests: int, known: _Load) -> None:
        rates = self._rates(known.times)
        best = self._best(known.times, known.chosen)
        lost = sum((SETTLE + WINDOW) * max(0.0, 1 - rate / rates[best]) for rate in rates.values())
        self._lost += lost
        if self._first_loss is None:
            self._first_loss = lost
        self._look_at = self._steps + max(lost / LOSS_SHARE, 16.0 * WINDOW)
        self.looks += 1
        before, known.chosen = known.chosen, best
        self._change(best)
        if before != best:
            self._switch(requests, best, known)

    def _use(self, want: int, requests: int, known: _Load) -> None:
        if known.chosen is not None and want != known.chosen:
            self._switch(requests, want, known)
            known.chosen = want
        if want != self._current:
            self._change(want)

    def _change(self, drafts: int) -> None:
        self._current = drafts
        self._settling = SETTLE

    def _switch(self, requests: int, drafts: int, known: _Load) -> None:
        self.switches += 1
        self._report(Choice(requests, drafts, {k: requests * rate for k, rate in self._rates(known.times).items()}))

    # ------------------------------------------------------------------------------------------------------ arithmetic

    def tokens(self, drafts: int) -> float:
        """Tokens per request in a step with `drafts` drafts."""
        accepted = (self._accepted[i] / self._verified[i] if self._verified[i] else 0.0 for i in range(drafts))
        return 1.0 + sum(accepted)

    def _rates(self, times: dict[int, float]) -> dict[int, float]:
        """Tokens per second and request, by number of drafts."""
        return {drafts: self.tokens(drafts) / seconds for drafts, seconds in times.items()}

    def _best(self, times: dict[int, float], current: int | None) -> int:
        rates = self._rates(times)
        best = max(rates, key=lambda drafts: rates[drafts])
        if current is not None and current in rates and rates[current] * (1 + MARGIN) >= rates[best]:
            return current
        return best

    def _nearest(self, load: int) -> int:
        """The best number by the times of the nearest measured load, or by `PRIOR` if there is none."""
        measured = {other: known.times for other, known in self._loads.items() if known.chosen is not None}
        if measured:
            return self._best(measured[min(measured, key=lambda other: abs(other - load))], self._current)
        if self._verified[0] < MIN_VERIFIED:
            return self.limit
        return self._best({drafts: 1 + PRIOR * drafts for drafts in range(self.limit + 1)}, self._current)


def _bucket(requests: int) -> int:
    """Index of the load by powers of two: 1, 2, 3–4, 5–8, … requests."""
    return max(requests - 1, 0).bit_length()


def _usual(step: Step, known: _Load) -> bool:
    """Whether the step took less than twice its known time; slower steps have another cause."""
    return step.seconds < 2 * known.times[step.drafts]
