"""What a run may use, and what came out of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one run.

    cpu_s: of all threads together, rounded up to whole seconds; load on the machine does not change it. wall_s: by the clock, for runs that
    sleep or wait; default: three times `cpu_s` and a second. memory_mb: what the run maps beyond the interpreter. tmp_mb: its files in
    /tmp, where it has one. output_bytes: stdout and stderr together.
    """

    cpu_s: float = 5.0
    wall_s: float | None = None
    memory_mb: int = 512
    tmp_mb: int = 16
    threads: int = 32
    output_bytes: int = 1 << 20

    @property
    def deadline_s(self) -> float:
        return 3 * self.cpu_s + 1 if self.wall_s is None else self.wall_s


@dataclass(frozen=True, slots=True)
class Result:
    """A run that has ended. `exit`: its exit code, minus the signal where one ended it.

    `timed_out` and `too_much_output`: it was killed for that. `out_of_memory`: it ended with a MemoryError, or could map no more.
    """

    stdout: str
    stderr: str
    exit: int
    timed_out: bool = False
    out_of_memory: bool = False
    too_much_output: bool = False
    cpu_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, with exit code 0."""
        return self.exit == 0 and not (self.timed_out or self.too_much_output)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of testing an answer: for each test None, or the reason why it failed. `timed_out`: whether some did not end in time.

    `decided`: the number of tests that ended, which are the first ones.
    """

    failures: list[str | None]
    timed_out: bool
    answer: Result
    decided: int = 0

    @property
    def passed(self) -> float:
        """Share of the tests that passed."""
        return sum(each is None for each in self.failures) / len(self.failures)
