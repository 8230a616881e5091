"""Routes: their format for a model, and their JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from mtpctl.families.reading import shape_of
from mtpctl.routes import RouteShape, from_json, to_json
from tests.fakes.toys import TOYS


def routes(config: dict[str, Any]) -> RouteShape | None:
    return RouteShape.of(shape_of(config))


def test_layers_are_moe_layers_without_mtp_layers() -> None:
    assert routes(TOYS["glm4-moe"]) == RouteShape((1,), 2, 6)
    assert routes({**TOYS["glm4-moe"], "num_hidden_layers": 4, "first_k_dense_replace": 2}) == RouteShape((2, 3), 2, 6)
    assert routes(TOYS["qwen3.5-moe"]) == RouteShape((0, 1), 2, 5)
    assert routes(TOYS["mimo"]) is None


@pytest.mark.parametrize(("experts", "dtype", "size"), [(256, np.uint8, 320), (257, np.uint16, 640)])
def test_expert_indices_have_the_smallest_dtype(experts: int, dtype: Any, size: int) -> None:
    shape = RouteShape(tuple(range(40)), 8, experts)
    assert (shape.dtype, shape.token_bytes) == (dtype, size)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routes_are_equal_after_json(dtype: Any) -> None:
    result = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (5, 3, 2)).astype(dtype)[1:, ::2]
    again = from_json(json.loads(json.dumps(to_json(result))))
    assert again.dtype == result.dtype and np.array_equal(again, result)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "dtype: must be uint8 or uint16"),
        ({"shape": [2, 1]}, "data: has 4 bytes"),
        ({"shape": [3, 1, 2]}, "data: has 4 bytes"),
        ({"shape": [1 << 62, 4, 4]}, "data: has 4 bytes"),
        ({"data": "??"}, "base64"),
    ],
)
def test_invalid_json_is_refused(change: dict[str, Any], message: str) -> None:
    whole = to_json(np.zeros((2, 1, 2), np.uint8))
    with pytest.raises(ValueError, match=message):
        from_json({**whole, **change})


def test_routes_may_be_empty() -> None:
    assert RouteShape((0,), 2, 4).fault(np.zeros((0, 1, 2), np.uint8), 5) is None
