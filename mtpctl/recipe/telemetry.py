"""The section `telemetry`: destinations of metrics in addition to the run directory."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from mtpctl.recipe.section import NonNegativeInt, Section

LOOPBACK = "127.0.0.1"
ADDRESS = re.compile(r"(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<host>[^\s:\[\]]*)):(?P<port>\d{1,5})")


def _with_host(value: object) -> object:
    """A port alone binds to the loopback address, which other machines cannot reach."""
    return f"{LOOPBACK}:{value}" if isinstance(value, int) and not isinstance(value, bool) else value


def _address(text: str) -> str:
    match = ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"must be HOST:PORT, such as {LOOPBACK}:9090, got {text!r}")
    return text if match["ipv6"] or match["host"] else f"{LOOPBACK}{text}"


Address = Annotated[str, BeforeValidator(_with_host), AfterValidator(_address)]
"""`HOST:PORT`; a port alone binds to the loopback address."""


class TelemetryConfig(Section):
    tensorboard: bool = Field(True, description="Write `tensorboard/` in the run directory.")
    wandb: str | None = Field(None, description="Weights & Biases project; needs the package wandb.")
    mlflow: str | None = Field(None, description="MLflow experiment; needs the package mlflow. MLFLOW_TRACKING_URI names the server.")
    group: str | None = Field(None, description="Group of the run in Weights & Biases, and the tag `mtpctl.group` in MLflow.")
    tags: list[str] = Field([], description="Tags of the run in Weights & Biases and MLflow.")
    http: Address | None = Field(
        None,
        description="HOST:PORT of the status page, /status.json, and /metrics for Prometheus; a port alone binds to 127.0.0.1, and port 0 "
        "to any free port.",
    )
    samples: NonNegativeInt = Field(
        8, description="Responses stored as text in `samples/` at each update, and for each held-out set at each evaluation; 0: none."
    )
    profile: bool = Field(
        False, description="Profile the third update of each stage; traces and tables go to `logs/` in the run directory."
    )

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of the status page; None if there is none."""
        match = None if self.http is None else ADDRESS.fullmatch(self.http)
        return None if match is None else (match["ipv6"] or match["host"], int(match["port"]))
