"""What Prometheus reads is what it can parse, whatever names, texts and values there are."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from mtpctl.web.server import Series, prometheus_text


def test_prometheus_parser_reads_output() -> None:
    odd = 'a "b"\n\\c'
    series = [
        Series("steps", "gauge", "Updates.", 3.0, {"run": odd, "stage": "rl"}),
        Series("lost_total", "counter", odd, 2),
        *(Series(f"odd_{place}", "gauge", "Odd.", value) for place, value in enumerate((math.nan, math.inf, -math.inf, 1e-300))),
    ]
    result = {family.name: family for family in text_string_to_metric_families(prometheus_text("x_", series))}
    assert result["x_steps"].samples[0].labels == {"run": odd, "stage": "rl"} and result["x_steps"].samples[0].value == 3
    assert (result["x_lost"].type, result["x_lost"].documentation, result["x_lost"].samples[0].value) == ("counter", odd, 2)
    values = [result[f"x_odd_{place}"].samples[0].value for place in range(4)]
    assert math.isnan(values[0]) and values[1:] == [math.inf, -math.inf, 1e-300]
