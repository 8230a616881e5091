"""docs/grafana-dashboard.json is current, and each of its queries names a metric that a run serves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from mtpctl.controller.status import _series
from mtpctl.telemetry.metrics_file import History
from mtpctl.telemetry.names import METRICS
from mtpctl.telemetry.runs import LiveStatus, ReplicaCounts

ROOT = Path(__file__).resolve().parents[2]


def test_dashboard_is_current() -> None:
    script = ROOT / "scripts" / "generate_grafana_dashboard.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_queries_name_served_metrics_of_the_chosen_runs(tmp_path: Path) -> None:
    live = LiveStatus(tmp_path / "a", {"rl": 10}, History([], []))
    live.row(1, dict.fromkeys(METRICS, 0.5), "rl")
    served = list(_series(live, ReplicaCounts(1, 1, 1, 1, 0)))
    assert all(series.labels["run"] == "a" for series in served)
    dashboard = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 15
    for query in queries:
        matched = re.fullmatch(r'mtpctl_(\w+)\{run=~"\$run"\}', query)
        assert matched is not None and matched[1] in {series.name for series in served}, query


def test_panels_do_not_overlap() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text(encoding="utf-8"))
    cells = [
        (column, row)
        for panel in dashboard["panels"]
        for place in [panel["gridPos"]]
        for column in range(place["x"], place["x"] + place["w"])
        for row in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(column for column, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
