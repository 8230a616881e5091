"""Fields of requests: honored, rejected by name, or ignored and listed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_type_hints

import httpx
import pytest
from openai.types.chat import completion_create_params

from mtpctl.environments.gateway.requests import ACCEPTED_VALUES, BOOKKEEPING_FIELDS, ChatMessage, ChatRequest, FieldRules, message_key
from mtpctl.environments.gateway.server import Gateway
from mtpctl.samples import ExtraSampling, GenerationRequest, Sample
from mtpctl.web.server import listen
from tests.fakes.scripted_engine import EOS, Scripted, byte_tokenizer, model_of, request_of
from tests.fakes.trajectories import reader

ASK: Any = [{"role": "user", "content": "1+1?"}]
TRAINING, IGNORING, SERVING = FieldRules(), FieldRules(ignore=True), FieldRules(client_sampling=True)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


class Recording(Scripted):
    """Remembers the requests."""

    def __init__(self, text: str = "yes") -> None:
        super().__init__(lambda before, call: text)
        self.requests: list[GenerationRequest] = []

    async def __call__(self, request: GenerationRequest) -> Sample:
        self.requests.append(request)
        return await super().__call__(request)


@asynccontextmanager
async def gateway_of(engine: Scripted, rules: FieldRules, **options: Any) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """A gateway and a client that calls it without a server: one would take a quarter of a second to stop."""
    calls = options.pop("calls", None)
    with listen("127.0.0.1", 0) as bound:
        gateway = Gateway(model_of(engine, calls=calls), byte_tokenizer(), "toy", 50, bound, rules=rules, **options)
        gateway.create_single_request = request_of
        transport = httpx.ASGITransport(app=gateway.app)
        async with httpx.AsyncClient(transport=transport, base_url=gateway.address, timeout=30) as web:
            yield gateway, web


def ask(engine: Scripted, rules: FieldRules, calls: Any = None, **fields: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with gateway_of(engine, rules, calls=calls) as (_, web):
            return await web.post("/v1/chat/completions", json={"messages": ASK, **fields})

    return asyncio.run(run())


HONORED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": 0}),
    ({"temperature": 0.3, "top_p": 0.5, "top_k": 7}, {"temperature": 0.3, "top_p": 0.5, "top_k": 7}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"seed": -3}, {"seed": -3}),
    ({"presence_penalty": 0.5, "frequency_penalty": -2}, {"extra_sampling": ExtraSampling(presence_penalty=0.5, frequency_penalty=-2)}),
    ({"repetition_penalty": 1.2, "min_p": 0.1}, {"extra_sampling": ExtraSampling(repetition_penalty=1.2, min_p=0.1)}),
    ({"logit_bias": {"65": -100, "66": 1.5}}, {"extra_sampling": ExtraSampling(logit_bias={65: -100, 66: 1.5})}),
    ({"min_tokens": 3, "bad_words": ["no"]}, {"extra_sampling": ExtraSampling(min_tokens=3, bad_words=["no"])}),
    ({"allowed_token_ids": [1, 2]}, {"extra_sampling": ExtraSampling(allowed_token_ids=[1, 2])}),
    ({"stop_token_ids": [10]}, {"stop_token_ids": [EOS, 10]}),
    ({"response_format": {"type": "json_object"}}, {"extra_sampling": ExtraSampling(grammar={"json_object": True})}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"extra_sampling": ExtraSampling(grammar={"json": SCHEMA})},
    ),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"extra_sampling": ExtraSampling(grammar={"choice": ["a", "b"]})}),
    ({"structured_outputs": {"regex": "a+"}}, {"extra_sampling": ExtraSampling(grammar={"regex": "a+"})}),
]


@pytest.mark.parametrize(("fields", "expected"), HONORED)
def test_a_served_request_has_the_sampling_settings_of_the_client(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    engine = Recording()
    answer = ask(engine, SERVING, **fields)
    assert answer.status_code == 200, answer.text
    assert "mtpctl-ignored" not in answer.headers
    (request,) = engine.requests
    assert {name: getattr(request, name) for name in expected} == expected


def test_choices_of_a_request_with_a_seed_get_different_seeds() -> None:
    engine = Recording()
    assert ask(engine, SERVING, seed=5, n=3).status_code == 200
    assert sorted(request.seed or 0 for request in engine.requests) == [5, 6, 7]


@pytest.mark.parametrize(("fields", "_"), HONORED)
def test_other_sampling_settings_in_training_are_rejected_by_name(fields: dict[str, Any], _: Any) -> None:
    if fields == {"top_k": -1}:
        return  # off, as the recipe has it
    name = next(name for name in ChatRequest.model_fields if name in fields)
    answer = ask(Recording(), TRAINING, **fields)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith(f"{name}: ") and "rollout.gateway_fields: ignore" in message


@pytest.mark.parametrize(("fields", "_"), HONORED)
def test_a_trained_request_is_answered_with_a_list_of_what_was_ignored(fields: dict[str, Any], _: Any) -> None:
    engine = Recording()
    answer = ask(engine, IGNORING, **fields, stream=True)
    assert answer.status_code == 200
    listed = set(answer.headers.get("mtpctl-ignored", "").split(", ")) - {""}
    assert listed == (set() if fields == {"top_k": -1} else set(fields))
    (request,) = engine.requests
    assert (request.temperature, request.top_p, request.top_k, request.seed, request.extra_sampling) == (1.0, 1.0, 0, None, None)


SAME = {
    "temperature": 1.0,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
}


@pytest.mark.parametrize("rules", [TRAINING, SERVING])
def test_fields_with_default_behavior_are_accepted(rules: FieldRules) -> None:
    anyway = {name: values[0] for name, values in ACCEPTED_VALUES.items() if values}
    nothing = dict.fromkeys([*ACCEPTED_VALUES, *ChatRequest.model_fields.keys() - {"messages"}])
    for fields in (SAME, anyway, nothing, dict.fromkeys(BOOKKEEPING_FIELDS, "x"), {"tool_choice": "auto", "parallel_tool_calls": True}):
        answer = ask(Recording(), rules, **fields)
        assert answer.status_code == 200 and "mtpctl-ignored" not in answer.headers, answer.text


OTHERS: list[tuple[str, Any]] = [
    ("top_logprobs", 5),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "add"}}),
    ("reasoning_effort", "low"),
    ("store", True),
    ("service_tier", "flex"),
    ("modalities", ["text", "audio"]),
    ("prediction", {"type": "content", "content": "x"}),
    ("functions", [{"name": "f"}]),
    ("verbosity", "low"),
    ("web_search_options", {}),
    ("echo", True),
    ("ignore_eos", True),
    ("use_beam_search", True),
    ("skip_special_tokens", False),
    ("continue_final_message", True),
    ("prompt_logprobs", 1),
    ("priority", 3),
    ("chat_template", "{{ messages }}"),
    ("documents", [{"text": "x"}]),
    ("return_token_ids", True),
    ("truncate_prompt_tokens", 5),
    ("vllm_xargs", {"a": 1}),
    ("temprature", 0.5),
    ("guided_json", {}),
]


@pytest.mark.parametrize("rules", [TRAINING, SERVING])
@pytest.mark.parametrize(("name", "value"), OTHERS)
def test_an_unsupported_field_is_rejected_by_name(name: str, value: Any, rules: FieldRules) -> None:
    answer = ask(Recording(), rules, **{name: value})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(f"{name}: ")
    assert ("did you mean temperature?" in answer.text) == (name == "temprature")


@pytest.mark.parametrize(("name", "value"), OTHERS)
def test_an_unsupported_field_is_listed_if_the_recipe_ignores_it(name: str, value: Any) -> None:
    answer = ask(Recording(), IGNORING, **{name: value})
    assert answer.status_code == 200 and answer.headers["mtpctl-ignored"] == name


def test_the_header_of_ignored_fields_can_hold_any_name() -> None:
    answer = ask(Recording(), IGNORING, **{"ü\n\u2603": 1, **{f"x{number}": 1 for number in range(100)}})
    assert answer.status_code == 200
    assert answer.headers["mtpctl-ignored"].startswith(r"\xfc\\n\u2603, x0, ") and answer.headers["mtpctl-ignored"].endswith(
        ", and 69 more"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": 2.5},
        {"temperature": 0.001},
        {"temperature": "0.5"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": 1.5},
        {"top_k": -2},
        {"min_p": 2},
        {"seed": 1 << 63},
        {"seed": 0.5},
        {"presence_penalty": 3},
        {"repetition_penalty": 0},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"1": 200}},
        {"logit_bias": {str(number): 1 for number in range(2000)}},
        {"min_tokens": -1},
        {"stop_token_ids": [-1]},
        {"bad_words": [""]},
        {"allowed_token_ids": []},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "x" * 70_000}}}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"json_object": False}},
        {"tools": [{}]},
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": 3},
    ],
)
def test_an_invalid_value_is_rejected_by_name(fields: dict[str, Any]) -> None:
    answer = ask(Recording(), SERVING, **fields)
    (name,) = fields
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith("response_format" if "x" * 70_000 in str(fields) else name), message
    assert "\n" not in message and len(message) < 500


def test_every_field_of_openais_schema_is_classified() -> None:
    schema = set(get_type_hints(completion_create_params.CompletionCreateParamsBase)) | {"stream"}
    assert schema - set(ChatRequest.model_fields) - set(ACCEPTED_VALUES) - BOOKKEEPING_FIELDS == set()


def test_every_field_of_vllms_schema_is_classified() -> None:
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    schema = set(protocol.ChatCompletionRequest.model_fields)
    assert schema - set(ChatRequest.model_fields) - set(ACCEPTED_VALUES) - BOOKKEEPING_FIELDS == set()


def test_parallel_tool_calls_false_returns_only_the_first_call() -> None:
    def two(text: str, tools: Any) -> tuple[str, list[tuple[str, str]]]:
        return "", [("add", "{}"), ("add", "{}")]

    tools = [{"type": "function", "function": {"name": "add"}}]
    for wanted, count in ((True, 2), (False, 1)):
        answer = ask(Recording(), TRAINING, calls=two, tools=tools, parallel_tool_calls=wanted)
        assert len(answer.json()["choices"][0]["message"]["tool_calls"]) == count


@pytest.mark.parametrize("depth", [1_000, 2_500, 100_000])
def test_arguments_that_are_nested_too_deeply_to_be_parsed_are_compared_as_text(depth: int) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "[" * depth + "]" * depth}}
    message = ChatMessage.model_validate({"role": "assistant", "content": "", "tool_calls": [call]})
    assert "[[" in message_key(message)


def test_template_variables_reach_the_template_and_separate_conversations() -> None:
    tokenizer = byte_tokenizer()
    template = tokenizer.inner.chat_template
    assert isinstance(template, str)
    tokenizer.inner.chat_template = tokenizer.chat_template = "{{ mood or '' }}" + template
    try:
        engine = Recording()

        async def run() -> list[str]:
            async with gateway_of(engine, TRAINING) as (gateway, web):
                secret, _ = gateway.open(request_of())
                url = f"/t/{secret}/v1/chat/completions"
                first = (await web.post(url, json={"messages": ASK, "chat_template_kwargs": {"mood": "glad "}})).json()
                more = [*ASK, first["choices"][0]["message"], *ASK]
                for mood in ("glad ", "sad "):
                    await web.post(url, json={"messages": more, "chat_template_kwargs": {"mood": mood}})
                return [tokenizer.decode(sample.token_ids) for sample in gateway.close(secret)]

        texts = asyncio.run(run())
    finally:
        tokenizer.inner.chat_template = tokenizer.chat_template = template
    assert [text.split()[0] for text in texts] == ["glad", "sad"] and texts[0].count("1+1?") == 2


# ------------------------------------------------------------------------------------------------------- answers


def test_log_probs_name_the_bytes_of_parts_of_a_character() -> None:
    answer = ask(Recording("é☃"), TRAINING, logprobs=True).json()["choices"][0]
    rows = answer["logprobs"]["content"]
    assert answer["message"]["content"] == "é☃"
    assert bytes(byte for row in rows[:-1] for byte in row["bytes"]).decode() == "é☃"
    assert [row["bytes"] for row in rows[:-1]] == [[byte] for byte in "é☃".encode()]
    assert (rows[-1]["token"], rows[-1]["bytes"]) == ("<eos>", list(b"<eos>"))
    by_id = ask(Recording("é"), TRAINING, logprobs=True, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]["content"]
    assert [row["token"] for row in by_id] == ["token_id:195", "token_id:169", f"token_id:{EOS}"]


@pytest.mark.parametrize("text", ["", "yes", 'CALL add {"a": 1}'])
def test_a_stream_has_the_log_prob_of_every_token_once(text: str) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    answer = ask(Recording(text), TRAINING, calls=reader, tools=tools, logprobs=True, stream=True)
    chunks = [httpx.Response(200, text=line.removeprefix("data: ")).json() for line in answer.text.split("\n\n") if "{" in line]
    result = [row for chunk in chunks for choice in chunk["choices"] if choice["logprobs"] for row in choice["logprobs"]["content"]]
    assert [row["bytes"] for row in result] == [[byte] for byte in text.encode()] + [list(b"<eos>")]
    assert all(row["logprob"] == -0.25 for row in result)


def test_an_answer_has_the_id_of_the_served_model() -> None:
    answer = ask(Recording(), SERVING, model="gpt-9")
    assert answer.json()["model"] == "toy"
