"""`bench rollout`: the model with known answers, the workloads, and the bounds. The engines run by hand and on a GPU."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F

from mtpctl.bench.rollout import (
    Bench,
    Options,
    Result,
    Send,
    format_row,
    format_verdict,
    gain_with_free_verification,
    make_row,
    send_alternately,
)
from mtpctl.bench.rollout_engines import TINY, Run, Workload, enter_all, expected_answer, make_workload, write_cycle_model
from mtpctl.errors import UserError
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import tensor_shapes

VOCAB, HALF = 1024, 512


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = write_cycle_model(tmp_path_factory.mktemp("model"), TINY, acceptance=0.75, device="cpu")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == tensor_shapes(shape_of(TINY)).keys()
    tensors = {}
    for name in sorted(set(index.values())):
        with safe_open(folder / name, "pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return tensors


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def test_trunk_predicts_the_next_token(tensors: dict[str, torch.Tensor]) -> None:
    # Attention and MLP output zeros, so the state before the head is the embedding.
    logits = norm(tensors["model.embed_tokens.weight"]) @ tensors["lm_head.weight"].T
    assert logits.argmax(-1).tolist() == [expected_answer(token, 1, VOCAB)[0] for token in range(VOCAB)]
    assert logits.log_softmax(-1).amax(-1).min() > -1e-4, "the answer is certain at a temperature of 1"
    for name, tensor in tensors.items():
        if "mtp_layers" not in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            assert not tensor.any()


def test_drafter_predicts_its_share_of_the_lower_half_and_none_of_the_upper(tensors: dict[str, torch.Tensor]) -> None:
    layer = "model.mtp_layers.0."
    embedding = tensors["model.embed_tokens.weight"]
    state = F.linear(torch.cat([torch.randn_like(embedding), norm(embedding)], -1), tensors[f"{layer}input_proj.weight"])
    inner = norm(state)
    gated = F.silu(F.linear(inner, tensors[f"{layer}mlp.gate_proj.weight"])) * F.linear(inner, tensors[f"{layer}mlp.up_proj.weight"])
    state = state + F.linear(gated, tensors[f"{layer}mlp.down_proj.weight"])
    drafts = (norm(state) @ tensors["lm_head.weight"].T).argmax(-1)
    right = drafts == torch.tensor([expected_answer(token, 1, VOCAB)[0] for token in range(VOCAB)])
    assert right[:HALF].float().mean() == pytest.approx(0.75, abs=0.06)
    assert right[HALF:].sum() <= 1, "the token that wrong drafts predict may be right by chance"


def test_existing_model_is_reused(tmp_path: Path) -> None:
    write_cycle_model(tmp_path, TINY, acceptance=0.5, device="cpu")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    write_cycle_model(tmp_path, TINY, acceptance=0.5, device="cpu")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_other_families_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a MiMo shape with one MTP layer, this is qwen2 with 0"):
        write_cycle_model(
            tmp_path, {**TINY, "architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 0}, acceptance=0.5, device="cpu"
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": 300}, "--tokens: 300 is too long for a vocabulary of 1024; at most 255"),
        ({"prompt": 900}, "--prompt: 900 tokens and answers of up to 64 need 1028 positions, but the model has 1024"),
    ],
)
def test_requests_too_long_for_the_model_are_rejected_before_it_is_written(tmp_path: Path, fields: dict[str, int], message: str) -> None:
    sizes = {"prompt": 16, "tokens": 32} | fields
    options = Options("tiny", tmp_path / "m", (8,), sizes["prompt"], sizes["tokens"], 3, 0.75, 1, "cpu")
    with pytest.raises(UserError, match=message):
        Bench(options, print, num_engines=1)
    assert not (tmp_path / "m").exists()


def test_workload_stays_in_its_half_of_the_vocabulary() -> None:
    for wrong_drafts in (False, True):
        workload = make_workload("l", 8, 40, prompt_length=16, mean_answer_length=100, spread=0.5, vocab=VOCAB, wrong_drafts=wrong_drafts)
        assert len(workload.prompts) == len(workload.lengths) == 40
        assert all(50 <= length <= 150 for length in workload.lengths) and len(set(workload.lengths)) > 10
        for prompt, length in zip(workload.prompts, workload.lengths, strict=True):
            half = {token // HALF for token in [prompt[-1], *expected_answer(prompt[-1], length, VOCAB)]}
            assert half == {int(wrong_drafts)}
    assert make_workload("l", 8, 8, prompt_length=4, mean_answer_length=100, spread=0.0, vocab=VOCAB).lengths == [100] * 8


def test_drafting_as_long_as_a_step_halves_the_gain() -> None:
    assert gain_with_free_verification(1.75, draft_s=0.0, step_s=0.004) == 1.75
    assert gain_with_free_verification(1.75, draft_s=0.001, step_s=0.004) == pytest.approx(1.4)
    assert gain_with_free_verification(1.5, draft_s=0.004, step_s=0.004) == pytest.approx(0.75)


LOAD = Workload("batch 8", 8, [], [])


def test_every_way_has_a_warmup_and_every_other_round_is_reversed() -> None:
    sent: list[str] = []

    def way(name: str) -> Send:
        async def send(workload: Workload) -> Run:
            sent.append(name)
            return Run(1.0, len(sent), 0)

        return send

    runs = asyncio.run(send_alternately(LOAD, {"a": way("a"), "b": way("b")}, 2))
    assert sent == ["b", "a", "a", "b", "b", "a"]
    assert {name: [run.tokens for run in of_way] for name, of_way in runs.items()} == {"a": [3, 6], "b": [4, 5]}
    assert asyncio.run(send_alternately(LOAD, {"a": way("a")}, 1, warm_up=False))["a"][0].tokens == 7


def test_ratio_is_of_runs_of_the_same_round() -> None:
    ours, theirs = [Run(1.0, tokens, 0) for tokens in (100, 200, 90)], [Run(1.0, tokens, 0) for tokens in (100, 100, 100)]
    result = make_row("ours", LOAD, ours, theirs, 0.95)
    assert (result.tokens_per_s, result.rates) == (100, (100, 200, 90))
    assert result.ratios == (1.0, 2.0, 0.9) and result.ratio == 1.0 and not result.misses
    slowed = make_row("ours", LOAD, [Run(2.0, 100, 0), Run(1.0, 90, 0)], [Run(2.0, 100, 0), Run(1.0, 100, 0)], 0.96)
    assert slowed.misses == ("0.950, bound 0.96",)
    assert make_row("theirs", LOAD, theirs).ratio is None


def test_wrong_answers_and_empty_slots_are_misses() -> None:
    result = make_row("ours", LOAD, [Run(1.0, 100, 2, idle=0.1), Run(1.0, 100, 0, idle=0.04), Run(1.0, 100, 0, idle=0.02)])
    assert result.misses == ("2 answers are not the model's", "slots empty 4.0% of the time, bound 3%")


class Engine:
    def __init__(self, log: list[str], name: str, fails: bool = False) -> None:
        self.log, self.name, self.fails = log, name, fails

    async def __aenter__(self) -> str:
        if self.fails:
            raise RuntimeError(f"{self.name} does not start")
        await asyncio.sleep(0)
        self.log.append(f"+{self.name}")
        return self.name

    async def __aexit__(self, *error: object) -> None:
        self.log.append(f"-{self.name}")


@pytest.mark.parametrize("fails", [False, True])
def test_started_engines_are_closed_if_another_fails(fails: bool) -> None:
    log: list[str] = []

    async def use() -> None:
        async with enter_all(Engine(log, "a"), Engine(log, "b", fails), Engine(log, "c")) as names:
            log.append("".join(names))

    if fails:
        with pytest.raises(RuntimeError, match="b does not start"):
            asyncio.run(use())
        assert log == ["+a", "+c", "-a", "-c"]
    else:
        asyncio.run(use())
        assert log == ["+a", "+b", "+c", "abc", "-a", "-b", "-c"]


def test_verdict_names_missed_bounds() -> None:
    rows = [
        Result("0 drafts", "batch 8", 100.0, (99.0, 101.0), 1.0, (1.0,), allowed=1.0, drafts=0),
        Result("2 drafts", "batch 8", 150.0, (149.0, 151.0), 1.5, (1.4, 1.5, 1.6), 0.7, 2.2, 0.0021, 93.4, 0.0101, 1.8, drafts=2),
        Result("auto", "batch 8", 90.0, (89.0, 91.0), 0.9, drafts=0, misses=("0.900, bound 0.98",)),
    ]
    assert (
        format_row(rows[1])
        == "| 2 drafts | batch 8 | 150 (149 – 151) | 1.500 (1.400 – 1.600) | 70.0% | 2.20 | 93, 10.10 | 2.10 | 1.80 | – |"
    )
    assert format_row(rows[0]).endswith("| – | – | – | – | 1.00 | – |")
    assert format_row(rows[2]).startswith("| auto → 0 drafts | batch 8 | 90 ")
    assert format_verdict(rows) == [
        "batch 8: best with 2 drafts, 1.50 times as fast as without speculation",
        "MISSED auto, batch 8: 0.900, bound 0.98",
    ]


def test_incomplete_model_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(acceptance: float) -> dict[str, bytes]:
        write_cycle_model(tmp_path / "m", TINY, acceptance=acceptance, device="cpu")
        return {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}

    first = write(0.75)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(0.25)
    assert write(0.75) == first
