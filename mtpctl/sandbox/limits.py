"""Limits of a run, and results of runs and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run.

    Attributes:
        cpu_s: CPU seconds of all threads together, rounded up to whole seconds. It does not depend on the load of the machine.
        wall_s: wall-clock seconds, for runs that sleep or wait; default: 3 `cpu_s` + 1.
        memory_mb: address space beyond that of the interpreter.
        tmp_mb: size of /tmp, if the run has one.
        output_bytes: stdout and stderr together.
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
    """A run that has ended.

    Attributes:
        exit: exit code, or minus the signal that ended it.
        timed_out, too_much_output: whether the run was killed for this reason.
        out_of_memory: whether it ended with a MemoryError.
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
        """Whether it was not killed and its exit code is 0."""
        return self.exit == 0 and not (self.timed_out or self.too_much_output)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of testing an answer.

    Attributes:
        failures: why each test failed; None if it passed.
        timed_out: whether some tests did not end in time.
        decided: number of tests that ended; these come first in `failures`.
    """

    failures: list[str | None]
    timed_out: bool
    decided: int = 0

    @property
    def passed(self) -> float:
        """Share of the tests that passed."""
        return sum(each is None for each in self.failures) / len(self.failures)
