"""Linear attention of an engine with `numerics: bitwise`: which state a sequence's step begins with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpctl.rollout.vllm.patches import NUMERICS
from mtpctl.rollout.vllm.patches.exact_delta import _reset_new_sequences, _split_by_drafts


@pytest.mark.parametrize(("numerics", "expected"), [("bitwise", [0, 3, 1]), ("default", [1, 3, 0])])
def test_prompt_of_one_token_with_drafts_begins_without_a_state(
    numerics: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def upstream(_builder: object, _prefix: int, _common: object, accepted: Tensor) -> Any:
        return accepted

    monkeypatch.setenv(NUMERICS, numerics)
    common: Any = SimpleNamespace(compute_num_computed_tokens=lambda: torch.tensor([0, 7, 3]))
    accepted: Any = _reset_new_sequences(upstream)(None, 0, common, torch.tensor([1, 3, 0]))  # type: ignore[arg-type]
    assert accepted.tolist() == expected


def test_step_has_a_part_with_drafts_and_one_without() -> None:
    metadata: Any = SimpleNamespace(
        num_prefills=2,
        num_decodes=0,
        num_spec_decodes=1,
        has_initial_state=torch.tensor([False, True]),
        non_spec_state_indices_tensor=torch.tensor([4, 5]),
        non_spec_query_start_loc=torch.tensor([0, 3, 4]),
        non_spec_token_indx=torch.tensor([0, 1, 2, 5]),
        spec_state_indices_tensor=torch.tensor([[7, 8]]),
        spec_query_start_loc=torch.tensor([0, 2]),
        spec_token_indx=torch.tensor([3, 4]),
        num_accepted_tokens=torch.tensor([2]),
    )
    parts = [[x.tolist() for x in part if isinstance(x, Tensor)] for part in _split_by_drafts(metadata)]
    assert parts == [[[0, 1, 2, 5], [0, 3, 4], [[4], [5]], [0, 1]], [[3, 4], [0, 2], [[7, 8]], [2]]]
    metadata.num_spec_decodes, metadata.num_prefill_tokens, metadata.num_decode_tokens = 0, 4, 0
    assert [part[0] for part in _split_by_drafts(metadata)] == [slice(4)]
