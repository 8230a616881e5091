"""How many drafts pay: found on a simulated engine whose times and acceptance are known."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

import pytest

from mtpctl.rollout.switch import Choice, SpeculationSwitch, Step


@dataclass
class Simulated:
    """Steps of `base_s` and `draft_s` more for each draft, with `accept` as the share of drafts accepted after accepted ones."""

    limit: int = 3
    base_s: float = 0.020
    draft_s: float = 0.004
    accept: float = 0.7
    noise: float = 0.05
    said: list[Choice] = field(default_factory=list)
    switch: SpeculationSwitch = field(init=False)

    def __post_init__(self) -> None:
        self.switch = SpeculationSwitch(self.limit, self.said.append)
        self.draw = random.Random(0)

    def step_s(self, drafts: int, requests: int) -> float:
        return self.base_s + self.draft_s * drafts

    def run(self, steps: int, requests: int) -> float:
        """Tokens a second over `steps` steps of the engine. A change shows one step late, as with scheduling ahead."""
        self.requests = requests
        tokens = seconds = 0.0
        drafts = self.switch.next_drafts()
        for _ in range(steps):
            took = self.step_s(drafts, requests) * self.draw.uniform(1 - self.noise, 1 + self.noise)
            accepted, left = [], requests
            for _ in range(drafts):
                left = sum(self.draw.random() < self.accept for _ in range(left))
                accepted.append(left)
            tokens += requests + sum(accepted)
            seconds += took
            self.switch.observe(Step(requests, drafts, took, tuple(accepted)))
            drafts = self.switch.next_drafts()
        return tokens / seconds

    def settled(self) -> int:
        """The drafts a step of the load sent last, once no trial is under way."""
        while self.switch.in_trial:
            self.run(1, self.requests)
        return self.switch.next_drafts()

    def rate(self, drafts: int, requests: int) -> float:
        """Tokens a second if every step had `drafts` drafts."""
        return requests * sum(self.accept**i for i in range(drafts + 1)) / self.step_s(drafts, requests)


@pytest.mark.parametrize(("accept", "best"), [(0.0, 0), (0.1, 0), (0.3, 1), (0.9, 3)])
def test_fastest_number_of_drafts_is_chosen_and_kept(accept: float, best: int) -> None:
    engine = Simulated(accept=accept)
    assert max(range(4), key=lambda drafts: engine.rate(drafts, 32)) == best
    engine.run(200, 32)
    reached = engine.run(3000, 32)
    assert engine.settled() == best
    assert reached > 0.98 * engine.rate(best, 32)


def test_useless_speculation_costs_less_than_two_percent() -> None:
    engine = Simulated(accept=0.0, draft_s=0.010)
    assert engine.run(6000, 64) > 0.98 * engine.rate(0, 64)


def test_decision_is_reported_with_its_measurements() -> None:
    engine = Simulated(limit=1, accept=0.05)
    engine.run(300, 8)
    (choice,) = engine.said
    assert choice.drafts == 0 and choice.tokens_per_s.keys() == {0, 1}
    message = r"speculation: 0 draft tokens for about 8 concurrent requests \(39\d tokens/s with 0, 35\d tokens/s with 1\)"
    assert re.fullmatch(message, str(choice))


class Crowded(Simulated):
    """Many requests together fill the GPU: a draft then costs as much as a token."""

    def step_s(self, drafts: int, requests: int) -> float:
        return self.base_s * (1 + drafts * min(1.0, requests / 256))


def test_new_load_triggers_a_trial() -> None:
    engine = Crowded()
    engine.run(1000, 8)
    assert engine.settled() == 3
    engine.run(3000, 256)
    assert engine.settled() == 0
    back = engine.run(500, 8)
    assert engine.settled() == 3
    assert back > 0.95 * engine.rate(3, 8), "what was seen at a load is remembered"


def test_falling_acceptance_is_detected_without_a_trial() -> None:
    engine = Simulated(limit=1)
    engine.run(500, 32)
    trials = engine.switch.trials
    engine.accept = 0.05
    engine.run(400, 32)
    assert (engine.settled(), engine.switch.trials) == (0, trials)


def test_new_weights_are_a_reason_to_trial() -> None:
    engine = Simulated(limit=1, accept=0.05)
    engine.run(6000, 32)
    assert engine.settled() == 0
    trials = engine.switch.trials
    engine.accept = 0.8
    engine.switch.on_weight_update()
    engine.run(200, 32)
    assert engine.switch.trials == trials + 1
    assert engine.settled() == 1


def test_new_weights_alone_do_not_switch_speculation_off() -> None:
    engine = Simulated(limit=1, accept=0.8)
    engine.run(500, 32)
    engine.switch.on_weight_update()
    assert engine.settled() == 1


def test_looks_are_limited_with_frequent_updates() -> None:
    engine = Simulated(accept=0.0)
    seconds = 0.0
    for _ in range(60):
        engine.switch.on_weight_update()
        seconds += 1 / engine.run(100, 32)
    assert 60 / seconds > 0.98 * engine.rate(0, 32)


def test_short_lived_load_gets_no_trial() -> None:
    engine = Simulated(accept=0.0, draft_s=0.010)
    engine.run(300, 64)
    trials, seconds, tokens = engine.switch.trials, 0.0, 0.0
    for _ in range(20):
        # A batch is sent, and ends: few requests run together for some steps, then many, then few.
        for steps, requests in ((4, 5), (4, 30), (120, 64), (6, 20), (3, 3)):
            rate = engine.run(steps, requests)
            seconds, tokens = seconds + steps * requests / rate, tokens + steps * requests
    assert engine.switch.trials == trials
    assert tokens / seconds > 0.98 * sum(s * r for s, r in ((4, 5), (4, 30), (120, 64), (6, 20), (3, 3))) / (137 * 0.020)


def test_trial_is_aborted_and_counted_if_the_load_grows() -> None:
    engine = Simulated(accept=0.0)
    engine.run(200, 64)
    engine.switch.on_weight_update()
    engine.switch._next_trial_step = 0
    engine.switch._lost_steps = engine.switch._first_trial_loss = 0.0
    engine.run(20, 64)
    assert engine.switch.in_trial
    engine.run(3, 16)
    assert not engine.switch.in_trial
    assert engine.switch._lost_steps > 0
    assert engine.settled() == 0


def test_drafts_that_are_never_right_stop_before_the_first_trial() -> None:
    engine = Simulated(accept=0.0)
    engine.run(8, 64)
    assert (engine.switch.next_drafts(), engine.switch.in_trial, engine.switch.trials) == (0, False, 0)
    useful = Simulated(accept=0.7)
    useful.run(8, 64)
    assert useful.switch.next_drafts() == 3


@pytest.mark.parametrize("accept", [0.0, 0.7])
def test_interrupted_first_trial_continues_with_the_next_batch(accept: float) -> None:
    # Batches of so few steps that no trial fits into one.
    engine = Simulated(accept=accept)
    for _ in range(8):
        engine.run(60, 64)
        engine.run(2, 3)
    engine.run(1, 64)
    assert engine.switch.trials == 1
    assert engine.switch.next_drafts() == (3 if accept else 0)


class Growing(Simulated):
    """Contexts grow, and steps with them."""

    age = 0

    def step_s(self, drafts: int, requests: int) -> float:
        self.age += 1
        return (self.base_s + self.draft_s * drafts) * (1 + self.age / 400)


def test_growing_contexts_do_not_re_enable_slow_drafting() -> None:
    engine = Growing(limit=1, accept=0.0)
    engine.run(100, 64)
    trials = engine.switch.trials
    drafted = 0
    for _ in range(1000):
        drafted += engine.switch.next_drafts() and not engine.switch.in_trial
        engine.run(1, 64)
    assert drafted == 0
    assert engine.switch.trials <= trials + 2


class Nearly(Simulated):
    """One draft and two yield nearly the same, as measured at 256 requests on an H200."""

    def step_s(self, drafts: int, requests: int) -> float:
        per_request = (33e-6, 45e-6, 64e-6, 88e-6)[drafts]
        return 0.005 + 0.001 * drafts + per_request * requests


def test_close_decision_is_stable_while_batches_end() -> None:
    engine = Nearly(accept=0.75)
    assert 0.97 < engine.rate(2, 256) / engine.rate(1, 256) < 1.03
    engine.run(160, 256)
    chosen, changes = engine.switch.next_drafts(), 0
    assert chosen in (1, 2) and engine.switch.trials == 1
    for _ in range(10):
        for steps, requests in ((3, 20), (140, 256), (4, 200), (4, 120), (4, 40), (3, 5)):
            for _ in range(steps):
                engine.run(1, requests)
                changes += engine.switch.next_drafts() != chosen
    assert changes == 0 and engine.switch.trials == 1


def test_fixed_number_of_drafts_never_changes() -> None:
    engine = Simulated(accept=0.0)
    engine.switch.fix_drafts(2)
    engine.run(1000, 32)
    assert (engine.settled(), engine.switch.trials) == (2, 0)
    engine.switch.fix_drafts(None)
    engine.run(300, 32)
    assert engine.settled() == 0
    with pytest.raises(ValueError, match="from 0 to 3 draft tokens are possible, got 4"):
        engine.switch.fix_drafts(4)
