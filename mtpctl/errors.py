"""Errors that end a command with one line and an exit code of their own."""

from __future__ import annotations

from collections.abc import Sequence


class MtpctlError(Exception):
    """A failure with a message of one line and an exit code."""

    exit_code = 5


class UserError(MtpctlError):
    """The user's mistake: the message names the recipe field, or file and line, and the fix."""

    exit_code = 2


class EnvironmentMissing(MtpctlError):
    """Something outside the recipe is missing: a package, a device, a hub that answers."""

    exit_code = 3


class ClusterResources(MtpctlError):
    """The cluster has fewer CPUs, GPUs or hosts than the recipe asks for."""

    exit_code = 4


class RuntimeFailure(MtpctlError):
    """Something failed while running; the message names the actor and the cause."""

    exit_code = 5


class SaveFailed(RuntimeFailure):
    """A checkpoint could not be written. The trainer can go on, and write another one."""


class ThresholdMissed(MtpctlError):
    """A measurement or parity check ended beyond its bound."""

    exit_code = 6


def first_of[E: MtpctlError](errors: Sequence[E]) -> E:
    """The first of several errors, with the others as its notes, which the command line prints a line each."""
    first, *others = errors
    for other in dict.fromkeys(map(str, others)):
        if other != str(first):
            first.add_note(other)
    return first


class UpstreamMoved(RuntimeError):
    """A vendor's package is not the release, or does not behave like the release, that a stand-in or patch was written for."""
