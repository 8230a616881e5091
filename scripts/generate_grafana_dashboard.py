#!/usr/bin/env python3
"""Write docs/grafana-dashboard.json, a Grafana dashboard of the metrics that `telemetry.http` serves to Prometheus.

Run it after a change of the panels below. `--check` writes nothing and exits 1 where the file is not current.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from generated_page import write_or_check

from mtpctl.telemetry.names import Unit, describe

PATH = Path(__file__).resolve().parents[1] / "docs" / "grafana-dashboard.json"
PANELS = {
    "Reward": ["reward/unfiltered_mean", "reward/mean"],
    "Held-out accuracy": ["eval/accuracy"],
    "Drafts accepted": ["rollout/spec_accept_rate"],
    "Throughput": ["perf/tokens_per_s", "rollout/tokens_per_s"],
    "Idle": ["async/trainer_idle", "async/rollout_idle"],
    "Staleness": ["async/staleness_mean", "async/staleness_max"],
    "Entropy": ["actor/entropy"],
    "Log-probs of engine and trainer": ["rollout_corr/abs_diff_same_version", "rollout_corr/abs_diff"],
    "Response length": ["response/length_mean", "response/length_max"],
    "Weight sync": ["sync/seconds", "sync/stall_seconds"],
    "Step": ["run_step", "run_steps"],
    "Replicas": ["run_replicas_serving", "run_replicas_requested"],
    "Restarts of replicas": ["run_replica_restarts_total"],
    "Seconds since the newest row": ["run_age_seconds"],
}
"""Panels and their metrics. Those of the run itself (`run_`) are named as /metrics names them."""
UNITS: dict[Unit, str] = {"share": "percentunit", "seconds": "s", "GB/s": "GBs"}
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
SOURCE = {"type": "prometheus", "uid": "${source}"}


def panel(index: int, title: str, metrics: list[str]) -> dict[str, object]:
    unit = "s" if title.startswith("Seconds") else UNITS.get(describe(metrics[0]).unit, "short")
    targets = [
        {
            "datasource": SOURCE,
            "expr": f'mtpctl_{re.sub(r"[^a-zA-Z0-9_]", "_", metric)}{{run=~"$run"}}',
            "legendFormat": "{{run}}" if len(metrics) == 1 else f"{{{{run}}}} {describe(metric).label or metric}",
            "refId": chr(ord("A") + place),
        }
        for place, metric in enumerate(metrics)
    ]
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": index % COLUMNS * WIDTH, "y": index // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}},
        "targets": targets,
    }


def page() -> str:
    variables = [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "run",
            "label": "Run",
            "type": "query",
            "datasource": SOURCE,
            "query": "label_values(mtpctl_run_step, run)",
            "multi": True,
            "includeAll": True,
            "refresh": 2,
        },
    ]
    dashboard = {
        "uid": "mtpctl-runs",
        "title": "mtpctl runs",
        "tags": ["mtpctl"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": [panel(index, title, metrics) for index, (title, metrics) in enumerate(PANELS.items())],
    }
    return json.dumps(dashboard, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PATH, page, script="generate_grafana_dashboard.py", about=__doc__))
