"""The section `telemetry`: where metrics go besides the run directory."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from mtpctl.recipe.section import NonNegativeInt, Section

LOOPBACK = "127.0.0.1"
ADDRESS = re.compile(r"(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:\[\]]*)):(?P<port>\d{1,5})")


def _with_host(value: object) -> object:
    """A port alone is one of this machine, which nobody else reaches."""
    return f"{LOOPBACK}:{value}" if isinstance(value, int) and not isinstance(value, bool) else value


def _address(text: str) -> str:
    found = ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(f"must be HOST:PORT, such as {LOOPBACK}:9090, got {text!r}")
    return text if found["ipv6"] or found["host"] else f"{LOOPBACK}{text}"


Address = Annotated[str, BeforeValidator(_with_host), AfterValidator(_address)]
"""`HOST:PORT`; a port alone gets the loopback address."""


class TelemetryConfig(Section):
    tensorboard: bool = Field(True, description="Write `tensorboard/` in the run directory.")
    wandb: str | None = Field(None, description="Weights & Biases project, where that package is installed.")
    mlflow: str | None = Field(
        None, description="MLflow experiment, where that package is installed; MLFLOW_TRACKING_URI says where it is kept."
    )
    group: str | None = Field(None, description="Group of the run in Weights & Biases, and the tag `mtpctl.group` in MLflow.")
    tags: list[str] = Field([], description="Tags of the run there.")
    http: Address | None = Field(
        None,
        description="HOST:PORT of a status page of the run, /status.json and /metrics for Prometheus; a port alone is one of 127.0.0.1, "
        "port 0 any that is free.",
    )
    samples: NonNegativeInt = Field(
        8, description="Responses to keep as text in `samples/` at each update and for each held-out set at each evaluation; 0: none."
    )
    profile: bool = Field(False, description="Profile the third update of each stage: trace and tables in `logs/` of the run directory.")

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of the status page; None where the recipe asks for none."""
        found = None if self.http is None else ADDRESS.fullmatch(self.http)
        return None if found is None else (found["ipv6"] or found["host"], int(found["port"]))
