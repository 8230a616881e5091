"""Rows of a request, which the core keeps until it ends, join at their positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches import routes

ROWS = np.arange(600, dtype=np.uint8).reshape(300, 1, 2)


def request(prompt: int, start: int = 0) -> Any:
    return SimpleNamespace(
        request_id="p/0/1-a", num_prompt_tokens=prompt, sampling_params=SimpleNamespace(routed_experts_prompt_start=start)
    )


def joined(asked: Any, *steps: tuple[int, int]) -> np.ndarray[Any, Any]:
    kept: dict[str, routes.KeptRoutes] = {}
    for start, end in steps:
        routes._join(kept, asked, start, ROWS[start:end])
    return kept[asked.request_id].rows


@pytest.mark.parametrize(
    "steps", [[(0, 100), (100, 101), (101, 104)], [(0, 20), *((i, i + 1) for i in range(20, 299))], [(0, 100), (90, 104), (104, 105)]]
)
def test_steps_join_and_what_is_there_stays(steps: list[tuple[int, int]]) -> None:
    assert np.array_equal(joined(request(100), *steps), ROWS[: steps[-1][1]])


def test_a_request_that_goes_on_begins_where_the_sample_has_none() -> None:
    assert np.array_equal(joined(request(100, 60), (60, 100), (100, 102)), ROWS[60:102])


def test_a_gap_is_told() -> None:
    with pytest.raises(UpstreamMoved, match=r"routes of p/0/1-a came from token 102 on where those of token 101 were due"):
        joined(request(100), (0, 101), (102, 103))


def test_rows_pass_between_processes_as_bytes() -> None:
    kept: dict[str, routes.KeptRoutes] = {}
    routes._join(kept, request(100), 0, ROWS[:100])
    scheduler = SimpleNamespace(aux_output_connector=SimpleNamespace(mtpctl_kept_routes=kept))
    found = routes.pending_of(scheduler, ["p/0/1-a", "gone"])
    assert np.array_equal(routes.as_rows(*found["p/0/1-a"]), ROWS[:100]) and list(found) == ["p/0/1-a"]
    assert routes.pending_of(SimpleNamespace(aux_output_connector=None), ["p/0/1-a"]) == {}
