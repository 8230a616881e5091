"""How samples become micro-batches."""

from __future__ import annotations

import time

import pytest

from mtpctl.trainer.batch import Sequence, dummy_batch, pack

BATCH = [
    Sequence([5, 6, 7, 8], 2, [1, 1], {"old": [0.1, 0.2]}),
    Sequence([1, 2, 3, 4, 9], 1, [1, 0, 1, 1], {"old": [0.3, 0.4, 0.5, 0.6]}),
]


class TestPack:
    def test_rows_predict_the_response(self):
        micro = pack(BATCH, [1, 0], 0, "cpu")
        assert micro.input_ids.tolist() == [1, 2, 3, 4, 9, 5, 6, 7, 8]
        assert (micro.rows.tolist(), micro.labels.tolist()) == ([0, 1, 2, 3, 6, 7], [2, 3, 4, 9, 7, 8])
        assert micro.mask.tolist() == [1, 0, 1, 1, 1, 1]
        assert micro.seq_ids.tolist() == [0, 0, 0, 0, 1, 1]
        assert micro.columns["old"].tolist() == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.1, 0.2])

    def test_depth_starts_at_the_last_prompt_token(self):
        """Depth k at position i predicts token i + 1 + k, never before the response, never a token that nobody sampled."""
        first, second = pack(BATCH, [1, 0], 2, "cpu").drafts
        assert (first.rows.tolist(), first.labels.tolist(), first.tokens.tolist()) == ([2, 6], [9, 8], [3, 5])
        assert second.tokens.tolist() == []

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_first_tokens_of_a_turn_are_not_drafted(self, depth):
        """What an environment says is read in one go, and the target samples what comes next, as behind the prompt."""
        turns = Sequence(list(range(1, 17)), 2, [1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1])
        alone = Sequence(list(range(1, 6)), 1, [1, 1, 1, 1])
        drafted = {1: [1, 2, 3, 7, 8, 13], 2: [2, 3, 8], 3: [3]}[depth]
        micro = pack([alone, turns], [0, 1], 3, "cpu").drafts[depth - 1]
        assert micro.tokens.tolist() == [*range(depth, 4), *(4 + place for place in drafted)]
        assert micro.rows.tolist() == [*range(4 - depth), *(5 + 1 + place - depth for place in drafted)]
        assert (turns.drafted(depth), alone.drafted(depth)) == (len(drafted), 4 - depth)

    def test_padding_is_a_separate_sample(self):
        micro = pack(BATCH, [0, 1], 1, "cpu", cp=2, tp=2)
        assert len(micro.input_ids) == 16
        assert micro.packing.starts.tolist() == [0, 4, 9, 16]
        assert max(micro.rows.tolist()) < 9


def test_padding_mask_marks_padding_and_dummy_tokens() -> None:
    batch = [Sequence([1] * 5, 2, [1] * 3), Sequence([2] * 4, 2, [1] * 2)]
    assert pack(batch, [0, 1], 0, "cpu").packing.padding_mask is None
    parts = [pack(batch, [0, 1], 0, "cpu", cp_rank=rank, cp=2, tp=2).packing for rank in range(2)]
    fills = {int(token) for part in parts for token in part.tokens[part.padding_mask]}
    assert fills == set(range(9, 16))
    none = dummy_batch(batch, 0, "cpu").packing
    assert none.padding_mask is not None and none.padding_mask.all()


def test_packing_takes_a_tenth_of_a_microsecond_a_token() -> None:
    batch = [Sequence([1] * 4096, 256, [1] * 3840, {name: [0.0] * 3840 for name in ("old", "behaviour", "advantage")}) for _ in range(8)]
    taken = []
    for _ in range(5):
        began = time.process_time()
        pack(batch, list(range(8)), 1, "cpu")
        taken.append(time.process_time() - began)
    assert min(taken) < 0.1e-6 * 8 * 4096
