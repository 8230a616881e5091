"""Settings of served requests before a real vLLM on the CPU, with drafts and without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mtpctl.data.tokenizers import make_byte_tokenizer
from mtpctl.errors import UserError
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.settings import VllmSettings
from mtpctl.samples import ExtraSampling, GenerationRequest, Sample
from tests.fakes.engine_checkpoints import random_tensors, reference_logprobs, tiny_config, write_checkpoint
from tests.fakes.engines import Loop, cpu_settings

EOS = 258
CONFIG = tiny_config(vocab_size=320, eos_token_id=EOS, bos_token_id=257)
TENSORS = random_tensors(CONFIG, 0)
PROMPT = list(b"12+34=")


@pytest.fixture(scope="module")
def engines(start_engine: Callable[[VllmSettings], VllmEngine], tmp_path_factory: pytest.TempPathFactory) -> dict[int, VllmEngine]:
    """By the number of drafts."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, CONFIG, TENSORS)
    make_byte_tokenizer(folder)
    result = {}
    for k in (0, 2):
        settings = cpu_settings(folder, k=k)
        settings.args.update(skip_tokenizer_init=False, tokenizer=str(folder))
        result[k] = start_engine(settings)
    return result


@pytest.fixture
def ask(engines: dict[int, VllmEngine], run: Loop) -> Callable[..., Sample]:
    def one(k: int, *, max_tokens: int = 40, extra_sampling: dict[str, Any] | None = None, **options: Any) -> Sample:
        requested = None if extra_sampling is None else ExtraSampling(**extra_sampling)
        options = {"stop_token_ids": [EOS]} | options
        return run(engines[k].generate(GenerationRequest(Sample("p", "g", list(PROMPT)), max_tokens, extra_sampling=requested, **options)))

    return one


Ask = Callable[..., Sample]


def text_of(sample: Sample) -> str:
    return bytes(token for token in sample.response_ids if token < 256).decode(errors="replace")


@pytest.mark.parametrize(
    "extra_sampling",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 2.0, "repetition_penalty": 0.9},
        {"min_tokens": 20},
        {"bad_words": ["a", "zz"]},
        {"allowed_token_ids": list(range(65, 80))},
    ],
)
def test_drafts_do_not_change_greedy_responses(ask: Ask, extra_sampling: dict[str, Any]) -> None:
    plain, drafted = (ask(k, extra_sampling=extra_sampling, temperature=0.0) for k in (0, 2))
    assert plain.response_ids == drafted.response_ids
    assert drafted.behaviour_logprobs.tolist() == pytest.approx(plain.behaviour_logprobs.tolist(), abs=1e-4)
    assert drafted.speculation.drafted > 0 == plain.speculation.drafted


@pytest.mark.parametrize("k", [0, 2])
def test_log_probs_are_those_of_the_tokens_that_are_allowed(ask: Ask, k: int) -> None:
    allowed = [65, 66, 67]
    sample = ask(k, extra_sampling={"allowed_token_ids": allowed}, temperature=0.7, seed=3, max_tokens=12)
    assert set(sample.response_ids) <= set(allowed)
    for place, logprob in enumerate(sample.behaviour_logprobs):
        before = PROMPT + sample.response_ids.tolist()[:place]
        each = torch.stack([reference_logprobs(CONFIG, TENSORS, [*before, token], 0.7)[-1] for token in allowed])
        assert logprob == pytest.approx(float(each.log_softmax(0)[allowed.index(sample.response_ids[place])]), abs=1e-4)


@pytest.mark.parametrize("k", [0, 2])
def test_a_penalty_lowers_the_log_prob_of_repeated_tokens(ask: Ask, k: int) -> None:
    """Two tokens are allowed, so the penalized distribution can be computed by hand."""
    allowed, penalty = [65, 66], 1.5
    extra_sampling = {"allowed_token_ids": allowed, "frequency_penalty": penalty}
    sample = ask(k, extra_sampling=extra_sampling, temperature=1.0, seed=1, max_tokens=12)
    for place, logprob in enumerate(sample.behaviour_logprobs):
        said = sample.response_ids.tolist()[:place]
        each = torch.stack(
            [reference_logprobs(CONFIG, TENSORS, [*PROMPT, *said, token])[-1] - penalty * said.count(token) for token in allowed]
        )
        assert logprob == pytest.approx(float(each.log_softmax(0)[allowed.index(sample.response_ids[place])]), abs=1e-4)


def test_logit_bias_and_min_p_work_without_drafts(ask: Ask) -> None:
    biased = ask(0, extra_sampling={"logit_bias": {65: 100.0}}, max_tokens=8)
    assert biased.response_ids.tolist() == [65] * 8
    greedy = ask(0, temperature=0.0)
    assert ask(0, extra_sampling={"min_p": 1.0}, temperature=1.0, seed=2).response_ids == greedy.response_ids


@pytest.mark.parametrize("extra_sampling", [{"min_p": 0.5}, {"logit_bias": {65: 1.0}}])
def test_settings_that_vllm_rejects_while_speculating_are_rejected_by_name(ask: Ask, extra_sampling: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^{next(iter(extra_sampling))}: .*rollout.speculation.num_tokens: 0"):
        ask(2, extra_sampling=extra_sampling)
    assert ask(2).response_ids, "the engine goes on"


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize("k", [0, 2])
def test_a_grammar_decides_the_text(ask: Ask, k: int) -> None:
    choice = ask(k, extra_sampling={"grammar": {"choice": ["blue", "green"]}}, seed=1)
    assert text_of(choice) in ("blue", "green") and choice.finish_reason == "stop"
    assert text_of(ask(k, extra_sampling={"grammar": {"regex": "[0-9]{3}-x"}}, seed=1))[3:] == "-x"
    written = text_of(ask(k, extra_sampling={"grammar": {"json": SCHEMA}}, seed=1, max_tokens=200))
    if "}" in written:  # random weights may go on with spaces
        assert json.loads(written)["n"] in (1, 22)
    else:
        assert written.startswith("{")


@pytest.mark.parametrize(
    ("extra_sampling", "reason"),
    [
        ({"grammar": {"regex": "("}}, "regex|grammar"),
        ({"grammar": {"json": {"type": "nothing"}}}, "response_format|grammar|schema"),
        ({"grammar": {"grammar": "root ::= "}}, "grammar"),
        ({"allowed_token_ids": [100_000]}, "allowed_token_ids"),
        ({"logit_bias": {100_000: 1.0}}, "logit_bias"),
        ({"min_tokens": 1000}, "min_tokens"),
    ],
)
def test_a_request_that_vllm_rejects_is_a_client_error_and_the_engine_continues(
    ask: Ask, extra_sampling: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=f"(?i){reason}") as caught:
        ask(0, extra_sampling=extra_sampling)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert ask(0).response_ids


def test_a_seed_repeats_a_response_with_extra_sampling(ask: Ask) -> None:
    extra_sampling = {"frequency_penalty": 1.0}
    first, again, other = (ask(2, extra_sampling=extra_sampling, temperature=1.0, seed=seed) for seed in (5, 5, 6))
    assert first.response_ids == again.response_ids != other.response_ids


def test_served_and_trained_requests_do_not_disturb_each_other(engines: dict[int, VllmEngine], run: Loop, ask: Ask) -> None:
    """Log-probs of plain requests stay those of the policy, whatever else is in the batch."""

    async def many() -> list[Sample]:
        extras = [
            ExtraSampling(frequency_penalty=2.0),
            ExtraSampling(grammar={"choice": ["blue", "green"]}),
            ExtraSampling(allowed_token_ids=[65, 66]),
        ]
        plain = [GenerationRequest(Sample(f"p{n}", "g", list(PROMPT)), 30, seed=n, temperature=0.8) for n in range(4)]
        served = [GenerationRequest(Sample(f"s{n}", "g", list(PROMPT)), 30, seed=n, extra_sampling=each) for n, each in enumerate(extras)]
        return (await asyncio.gather(*map(engines[2].generate, [*plain, *served])))[:4]

    for sample in run(many()):
        scored = reference_logprobs(CONFIG, TENSORS, sample.token_ids.tolist(), 0.8)[len(PROMPT) - 1 :]
        assert sample.behaviour_logprobs.tolist() == pytest.approx(scored.tolist(), abs=1e-4)
