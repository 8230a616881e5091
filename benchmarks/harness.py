"""Shared code of the benchmark scripts: argument parsing, alternating measurements, and exit codes.

Run a script from the checkout as `python benchmarks/NAME.py`; `--help` prints its options. Exit code 6 means that a bound was missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

from mtpctl.bench.report import describe_machine, format_environment, format_spread
from mtpctl.compat import cpu_device

BOUND_MISSED = 6

# Must run before a script imports Megatron.
cpu_device.install()


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser whose help is the script's docstring with its examples."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def alternate(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run all ways in turn, `rounds` times after a warm-up round. Returns the values that they return, by name."""
    results: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(-1, rounds):
        for name, run in cases.items():
            result = run()
            if round_number >= 0:
                results[name].append(result)
    return results


def print_environment() -> None:
    print(f"{format_environment(describe_machine())}\n", flush=True)


def print_spread(name: str, values: Sequence[float], unit: str, format_spec: str = ".2f") -> float:
    """Print median, minimum and maximum. Returns the median."""
    print(f"{name}: {format_spread(values, format_spec)} {unit}", flush=True)
    return statistics.median(values)


def finish(misses: Sequence[str]) -> None:
    """Print the missed bounds. Exits with code 6 if there are any."""
    for miss in misses:
        print(f"missed: {miss}", file=sys.stderr)
    if misses:
        sys.exit(BOUND_MISSED)
