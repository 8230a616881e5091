"""Requests are admitted in bursts if a prefill costs extra, by as much as that saves, and never at the expense of latency."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from mtpctl.rollout.vllm.patches.admission import MAX_HELD_SHARE, MAX_HOLD_S, AdmissionBursts, fit_costs


@dataclass
class Simulated:
    """An engine whose steps take known times. tokens_per_s: of the whole simulation. largest: most requests admitted in one step."""

    tokens_per_s: float
    largest: int
    longest_hold_s: float
    bursts: AdmissionBursts


def simulate(
    step: float, prefill: float, token: float, *, holds: bool = True, slots: int = 256, mean: int = 40, prompt: int = 60, steps: int = 4000
) -> Simulated:
    """Responses of exponential lengths; as many requests as a sixteenth of the slots wait while all slots are full, as in a pool.

    step: seconds of a step with full slots, of which 0.3 do not depend on the number of requests. prefill: what the first prefilled request
    adds to a step. token: what each prefilled token adds.
    """
    draw = random.Random(0)
    bursts = AdmissionBursts(slots)
    lengths: list[int] = []
    waiting, tokens, largest, now, longest = 0, 0, 0, 0.0, 0.0
    held_since: float | None = None
    for _ in range(steps):
        waiting = max(waiting, slots + slots // 16 - len(lengths))
        holds_back = holds and bursts.should_hold(now, len(lengths), waiting)
        held_since = (now if held_since is None else held_since) if holds_back else None
        longest = max(longest, now - held_since) if held_since is not None else longest
        admitted = 0 if holds_back else min(waiting, slots - len(lengths))
        waiting -= admitted
        lengths += [int(draw.expovariate(1 / mean)) + 1 for _ in range(admitted)]
        # A prompt whose group is in the prefix cache has only its last block to compute.
        prefilled = sum(draw.choice([prompt, 16]) for _ in range(admitted))
        bursts.record_step(now, len(lengths), prefilled)
        seconds = step * (0.3 + 0.7 * len(lengths) / slots) + prefill * bool(admitted) + token * prefilled
        now += seconds * draw.gauss(1, 0.03)
        tokens += len(lengths)
        largest = max(largest, admitted if tokens > 50 * slots else 0)
        lengths = [left - 1 for left in lengths if left > 1]
    return Simulated(tokens / now, largest, longest, bursts)


def test_costly_prefills_are_made_rarer() -> None:
    """Steps of 20 ms, in nearly all of which a response ends: a quarter of a step more for each with a prefill."""
    bursts, at_once = simulate(0.02, 0.008, 2e-6), simulate(0.02, 0.008, 2e-6, holds=False)
    assert bursts.bursts.step_s == pytest.approx(0.02, rel=0.1)
    assert bursts.bursts.prefill_s == pytest.approx(0.008, rel=0.3)
    assert bursts.tokens_per_s > 1.15 * at_once.tokens_per_s
    assert at_once.largest < bursts.largest <= 256 * MAX_HELD_SHARE + 256 / 8


@pytest.mark.parametrize(("slots", "mean", "prompt"), [(256, 500, 1000), (64, 300, 500), (256, 40, 60)])
def test_a_prefill_whose_cost_is_its_tokens_is_not_delayed(slots: int, mean: int, prompt: int) -> None:
    bursts, at_once = (simulate(0.03, 0.0, 3e-5, holds=holds, slots=slots, mean=mean, prompt=prompt) for holds in (True, False))
    assert bursts.bursts.prefill_s < 0.1 * bursts.bursts.step_s
    assert bursts.tokens_per_s > 0.98 * at_once.tokens_per_s


def test_a_hold_is_limited_in_time() -> None:
    """If a response ends rarely, even a costly prefill is not delayed for longer."""
    slow = simulate(0.05, 0.2, 0.0, mean=2000, steps=20_000)
    assert slow.bursts.prefill_s > 0.05
    assert 0 < slow.longest_hold_s <= MAX_HOLD_S + 0.1


def test_requests_are_admitted_at_once_unless_the_engine_is_full() -> None:
    full = simulate(0.02, 0.01, 0.0).bursts
    full._trials.clear()
    full._end_hold()
    assert full.should_hold(0.0, 250, 20), "few of the slots are empty, and more requests than those wait"
    full._end_hold()
    assert not full.should_hold(0.0, 100, 1), "a lone request next to others that do not fill the engine"
    assert not full.should_hold(0.0, 0, 256), "nothing decodes"
    assert not full.should_hold(0.0, 256, 20), "no slot is empty"
    assert not full.should_hold(0.0, 256 - 64, 64), "enough for the largest burst"
    small = AdmissionBursts(16)
    assert not any(small.should_hold(now, 15, 3) for now in range(50))


def test_costs_that_the_cycles_do_not_separate_are_unknown() -> None:
    assert fit_costs([(0.03, 1.0, 60.0)] * 50) == (0.0, 0.0), "each cycle is one step"
    cycles = [(0.02 * steps + 0.005 + 1e-5 * tokens, steps, tokens) for steps in (1.0, 2.0, 3.0, 5.0) for tokens in (16.0, 60.0, 400.0)]
    assert fit_costs(cycles) == (pytest.approx(0.02), pytest.approx(0.005))
    assert fit_costs([*cycles, (5.0, 2.0, 16.0)]) == (pytest.approx(0.02), pytest.approx(0.005)), "a pause for a weight update"
