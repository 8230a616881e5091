"""The package's errors. They end a command with a one-line message and an exit code."""

from __future__ import annotations

from collections.abc import Sequence


class MtpctlError(Exception):
    """An error with a one-line message and an exit code."""

    exit_code = 5


class UserError(MtpctlError):
    """A mistake in the user's input. The message names the recipe field, or file and line, and the fix."""

    exit_code = 2


class PrerequisiteMissing(MtpctlError):
    """Something outside the recipe is missing: a package, a device, access to the hub."""

    exit_code = 3


class ClusterResources(MtpctlError):
    """The cluster has fewer CPUs, GPUs or hosts than the recipe needs."""

    exit_code = 4


class RuntimeFailure(MtpctlError):
    """A failure at run time. The message names the actor and the cause."""

    exit_code = 5


class SaveFailed(RuntimeFailure):
    """A checkpoint could not be written. Training can continue and write another one."""


class ThresholdMissed(MtpctlError):
    """A measurement or parity check missed its bound."""

    exit_code = 6


def with_notes[E: MtpctlError](errors: Sequence[E]) -> E:
    """Return the first error, with the others as notes. The command line prints notes on separate lines."""
    first, *others = errors
    for other in dict.fromkeys(map(str, others)):
        if other != str(first):
            first.add_note(other)
    return first


class UpstreamMoved(RuntimeError):
    """An upstream package differs from the release for which a patch was written."""
