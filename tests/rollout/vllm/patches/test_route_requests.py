"""Routes stored by slot are returned by position: whole, in parts, after preemption, and before an abort."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from mtpctl.errors import UpstreamMoved
from mtpctl.rollout.vllm.patches.logprobs import DEFERRED
from mtpctl.rollout.vllm.patches.routes import (
    SlotConnector,
    SlotRecorder,
    Span,
    deserialize_rows,
    find_full_attention_group,
    serialize_unsent_rows,
    slots_of,
)

BLOCK, BLOCKS = 4, 40
SHAPE = (3, 2)


def spec(block: int = BLOCK) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)


def cache_of(*groups: Any) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([str(i)], g) for i, g in enumerate(groups)]
    )


def row_of(token: int) -> np.ndarray[Any, Any]:
    """The row that the pass over a token leaves; a token that is read again leaves another one."""
    return np.arange(6).reshape(SHAPE) * 7 + token


class Gpu:
    """A recorder with rows on the CPU, and the blocks of requests, which are given out in random order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.free = list(range(BLOCKS))
        self.random.shuffle(self.free)
        self.blocks: dict[str, list[int]] = {}
        self.recorder = SlotRecorder.__new__(SlotRecorder)
        recorder: Any = self.recorder
        recorder._capturer = SimpleNamespace(device_buffer=torch.zeros((64, *SHAPE), dtype=torch.int32))
        recorder.group, recorder._block_size, recorder._shape, recorder._dtype = 0, BLOCK, SHAPE, np.dtype(np.uint16)
        recorder._rows = torch.full((BLOCKS * BLOCK, 6), -1, dtype=torch.int16)
        recorder._stream, recorder._in_step, recorder.slots = None, False, torch.zeros((1, 64), dtype=torch.int64)
        self.connector = SlotConnector()
        manager = SimpleNamespace(kv_cache_config=cache_of(spec()), get_block_ids=lambda name: ([*self.blocks.get(name, [])],))
        self.connector.attach(SimpleNamespace(kv_cache_manager=manager), self.fetch)  # type: ignore[arg-type]

    def fetch(self, spans: list[Span], under_way: bool) -> Any:
        return self.recorder.fetch(spans, under_way)

    def run(self, request: Any, start: int, tokens: list[int]) -> None:
        """A step in which a request reads `tokens` from position `start` on."""
        mine = self.blocks.setdefault(request.request_id, [])
        while len(mine) * BLOCK < start + len(tokens):
            mine.append(self.free.pop())
        recorder: Any = self.recorder
        for place, token in enumerate(tokens):
            recorder._capturer.device_buffer[place] = torch.from_numpy(row_of(token))
        recorder.slots[0, : len(tokens)] = torch.from_numpy(slots_of(mine[start // BLOCK :], start, start + len(tokens), BLOCK))
        recorder.begin_step(None)
        recorder.prepare_output(SimpleNamespace(query_start_loc_np=np.array([0, len(tokens)]), req_ids=["r"]))
        request.num_computed_tokens = start + len(tokens)

    def give_up(self, request: Any) -> None:
        """Take the blocks away, and have others write into them."""
        self.connector.request_finished(request)
        for block in (taken := self.blocks.pop(request.request_id)):
            self.recorder._rows[block * BLOCK : (block + 1) * BLOCK] = -9  # type: ignore[index]
        self.free += taken
        self.random.shuffle(self.free)

    def delivered(self, request: Any) -> Any:
        """What the output of this step carries."""
        output = SimpleNamespace(request_id=request.request_id, routed_experts=None)
        self.connector.take_output(request, None)
        self.connector.add_to_outputs([SimpleNamespace(outputs=[output])])  # type: ignore[list-item]
        return output.routed_experts


def request_of(tokens: int, *, start: int = 0, deferred: bool = True) -> Any:
    sampling = SimpleNamespace(routed_experts_prompt_start=start, extra_args=dict(DEFERRED) if deferred else None)
    created = SimpleNamespace(request_id="r-1", sampling_params=sampling, num_prompt_tokens=tokens, num_tokens=tokens, ended=False)
    created.num_computed_tokens, created.is_finished = 0, lambda: created.ended
    return created


def rows_of(tokens: list[int]) -> np.ndarray[Any, Any]:
    return np.stack([row_of(token) for token in tokens]) if tokens else np.zeros((0, *SHAPE), int)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("deferred", [True, False])
def test_rows_of_a_response_with_drafts(seed: int, deferred: bool) -> None:
    """The first token that is wanted, drafts that are rejected, and outputs of several tokens."""
    gpu, draw = Gpu(seed), random.Random(seed)
    first, prompt = draw.choice([0, 3, 9]), draw.randint(10, 20)
    request, tokens = request_of(prompt, start=first, deferred=deferred), [100 + i for i in range(prompt)]
    gpu.run(request, 0, tokens[: prompt // 2])
    gpu.run(request, prompt // 2, tokens[prompt // 2 :])
    result: list[Any] = []
    for step in range(12):
        tokens.append(200 + 10 * step)  # sampled behind what was read, drafts that were accepted included
        request.num_tokens, request.ended = len(tokens), step == 11
        result.append(gpu.delivered(request))
        drafts = [201 + 10 * step + i for i in range(draw.randint(0, 3))]
        gpu.run(request, len(tokens) - 1, [tokens[-1], *drafts])
        tokens += drafts[: draw.randint(0, len(drafts))]
    parts = [each for each in result if each is not None]
    assert len(parts) == (1 if deferred else 12)
    rows = np.concatenate(parts)
    assert np.array_equal(rows, rows_of(tokens[first : first + len(rows)]))
    assert first + len(rows) >= len(tokens) - 4


@pytest.mark.parametrize("seed", range(10))
def test_a_preempted_request_keeps_the_rows_of_the_pass_that_sampled_its_tokens(seed: int) -> None:
    gpu = Gpu(seed)
    request, tokens = request_of(6), [10, 11, 12, 13, 14, 15]
    gpu.run(request, 0, tokens)
    for token in (20, 21, 22):
        tokens.append(token)
        request.num_tokens = len(tokens)
        assert gpu.delivered(request) is None
        gpu.run(request, len(tokens) - 1, [token])
    gpu.give_up(request)
    gpu.run(request, 0, [each + 500 for each in tokens])  # read again, under other weights
    tokens += [30]
    request.num_tokens, request.ended = len(tokens), True
    rows = gpu.delivered(request)
    # The last one was under way when its request was preempted: whether its token would come was not known.
    assert np.array_equal(rows, rows_of([*tokens[:8], 522]))
    gpu.connector.request_finished(request)
    assert not gpu.connector._preemptions and not gpu.connector._sent_end


def test_request_preempted_within_its_prefill_has_the_rows_of_the_second_pass() -> None:
    gpu = Gpu(3)
    request, tokens = request_of(6), [10, 11, 12, 13, 14, 15]
    gpu.run(request, 0, tokens[:5])
    gpu.give_up(request)
    again = [each + 500 for each in tokens]  # under other weights
    gpu.run(request, 0, again)
    request.num_tokens, request.ended = 7, True
    assert np.array_equal(gpu.delivered(request), rows_of(again))


def test_request_that_ends_by_a_step_in_flight_has_its_rows() -> None:
    gpu = Gpu(1)
    request, tokens = request_of(3), [10, 11, 12, 20]
    gpu.run(request, 0, tokens[:3])
    request.num_tokens = 4
    gpu.run(request, 3, [20])
    gpu.give_up(request)
    request.num_tokens, request.ended = 5, True
    assert np.array_equal(gpu.delivered(request), rows_of(tokens))


def test_pending_rows_are_read_before_an_abort() -> None:
    gpu = Gpu(2)
    request, tokens = request_of(5, start=2), [10, 11, 12, 13, 14, 20]
    gpu.run(request, 0, tokens[:5])
    request.num_tokens = 6
    assert np.array_equal(gpu.connector.read_unsent_rows(request), rows_of(tokens[2:5]))
    gpu.run(request, 5, [20, 99])
    assert np.array_equal(gpu.connector.read_unsent_rows(request), rows_of(tokens[2:5])), (
        "token 20 has another one behind it, which is not known yet"
    )
    gpu.give_up(request)
    assert np.array_equal(gpu.connector.read_unsent_rows(request), rows_of(tokens[2:5]))


def test_pending_rows_survive_serialization() -> None:
    gpu = Gpu(4)
    request, tokens = request_of(3), [10, 11, 12, 20]
    gpu.run(request, 0, tokens[:3])
    request.num_tokens = 4
    others = request_of(3, deferred=False)
    scheduler = SimpleNamespace(aux_output_connector=gpu.connector, requests={"r-1": request, "others": others})
    result = serialize_unsent_rows(scheduler, ["r-1", "others", "gone"])
    assert list(result) == ["r-1"] and np.array_equal(deserialize_rows(*result["r-1"]), rows_of(tokens[:3]))
    assert serialize_unsent_rows(SimpleNamespace(aux_output_connector=None), ["r-1"]) == {}


def test_a_step_that_warms_up_writes_nothing() -> None:
    gpu = Gpu(3)
    recorder: Any = gpu.recorder
    recorder.prepare_output(SimpleNamespace(query_start_loc_np=np.array([0, 3]), req_ids=["r"]))
    assert bool((recorder._rows == -1).all())


def test_cache_group_with_full_attention_is_selected() -> None:
    state = MambaSpec(block_size=BLOCK, shapes=((4,),), dtypes=(torch.float32,))
    assert find_full_attention_group(cache_of(state, spec())) == 1
    with pytest.raises(UpstreamMoved, match="the model has no such layer"):
        find_full_attention_group(cache_of(state))


def test_too_few_blocks_raise() -> None:
    with pytest.raises(UpstreamMoved, match="tokens 3 to 9 need more than 2 blocks of 4"):
        slots_of([5, 6], 3, 9, 4)
