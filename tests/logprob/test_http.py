"""A real server over a real model, through HTTP: the numbers against transformers, and clients of every kind."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from mtpctl.data.tokenizers import load_tokenizer
from mtpctl.logprob.http import make_app
from mtpctl.logprob.replica import Replica
from mtpctl.logprob.server import LogprobServer
from mtpctl.web.guard import HttpBounds
from mtpctl.web.server import with_timeouts
from tests.fakes.logprob import Started
from tests.fakes.logprob_ranks import serve

KEY = "s3cret"
BOUNDS = HttpBounds(body_bytes=1 << 20, total_bytes=4 << 20, body_s=0.6, header_s=0.5, drain_s=2.0)


class Served:
    """A server in a separate thread, with its own port."""

    def __init__(self, make: Callable[[], Replica], folder: Path, **limits: Any) -> None:
        self.port = 0
        self.server: LogprobServer
        self.loop: asyncio.AbstractEventLoop
        self._ready = threading.Event()
        self._make, self._folder, self._limits = make, folder, limits
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    async def _run(self) -> None:
        async def start(_: int) -> Replica:
            return self._make()

        self.loop = asyncio.get_running_loop()
        self.server = await serve(start, **self._limits)
        app = make_app(self.server, load_tokenizer(self._folder), "tiny", key=KEY, bounds=BOUNDS)
        config = uvicorn.Config(app, http=with_timeouts(BOUNDS.header_s), ws="none", lifespan="off", log_level="error", access_log=False)
        self._web = uvicorn.Server(config)
        self._web.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            self.port = bound.getsockname()[1]
            self._ready.set()
            await self._web.serve(sockets=[bound])
        await self.server.close()

    def call(self, coroutine: Any, seconds: float = 20) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(seconds)

    def client(self, key: str | None = KEY) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=30)

    def end(self) -> None:
        self._web.should_exit = True
        self._thread.join(20)


@pytest.fixture(scope="module")
def served(engine: Any, folder: Path) -> Iterator[Served]:
    from mtpctl.logprob.rank import ScoreRank
    from tests.fakes.logprob_ranks import LocalRanks, replica_config

    def make() -> Replica:
        rank = ScoreRank(replica_config(folder), 0)
        return Replica(LocalRanks(rank), rank.adopt(engine), 0, keep_previous=False)

    one = Served(make, folder, tokens_per_batch=1024, queue_tokens=20_000)
    yield one
    one.end()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as one:
        yield one


@pytest.fixture(scope="module")
def reference(engine: Any, folder: Path) -> Callable[[list[int], float], torch.Tensor]:
    """Log-probs [T, vocab] of transformers' own model, float64 softmax."""
    from safetensors.torch import load_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(Qwen2Config.from_pretrained(folder)).eval()
    weights = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if ".mtp_layers." not in name}
    model.load_state_dict(weights)

    def logprobs(ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            return (model(torch.tensor([ids])).logits[0].double() / temperature).log_softmax(-1)

    return logprobs


def sequences(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 320, (n,), generator=generator).tolist() for n in lengths]


def score(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/logprobs", json=body)
    assert response.status_code == 200, response.text
    return response.json()


LENGTHS = [2, 3, 17, 64, 65, 130, 300, 512]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_are_those_of_transformers(client: httpx.Client, reference: Any, temperature: float) -> None:
    inputs = sequences(LENGTHS)
    starts = [max(1, len(ids) // 3) for ids in inputs]
    answer = score(client, token_ids=inputs, prompt_length=starts, temperature=temperature, top_logprobs=3)
    assert [one["index"] for one in answer["data"]] == list(range(len(inputs)))
    for one, ids, start in zip(answer["data"], inputs, starts, strict=True):
        expected = reference(ids, temperature)[start - 1 : -1]
        labels = torch.tensor(ids[start:])
        assert one["token_ids"] == ids[start:]
        torch.testing.assert_close(torch.tensor(one["logprobs"]).double(), expected.gather(1, labels[:, None])[:, 0], atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(one["entropy"]).double(), -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=0)
        top = expected.topk(3)
        assert torch.tensor([[t["id"] for t in row] for row in one["top_logprobs"]]).equal(top.indices)
        result = torch.tensor([[t["logprob"] for t in row] for row in one["top_logprobs"]]).double()
        torch.testing.assert_close(result, top.values, atol=1e-5, rtol=0)


def test_mtp_scores_are_those_of_the_drafter(client: httpx.Client, folder: Path) -> None:
    from safetensors.torch import load_file

    from tests.fakes import mimo_reference
    from tests.fakes.logprob_ranks import CONFIG

    ids = sequences([40])[0]
    one = score(client, token_ids=ids, prompt_length=10, mtp=True)["data"][0]
    _, (draft,) = mimo_reference.forward(load_file(folder / "model.safetensors"), CONFIG, ids, 1)
    # Entry i of the draft predicts token i + 2; the first response token is sampled before there is a draft.
    expected = draft.double().log_softmax(-1)[9:][: len(ids) - 11]
    labels = torch.tensor(ids[11:])
    (depth,) = one["mtp"]
    assert depth["depth"] == 1 and depth["logprobs"][0] is None and depth["hits"][0] is None
    torch.testing.assert_close(torch.tensor(depth["logprobs"][1:]).double(), expected.gather(1, labels[:, None])[:, 0], atol=1e-5, rtol=0)
    assert depth["hits"][1:] == (expected.argmax(-1) == labels).tolist()


def test_answer_is_bit_identical_alone_and_in_mixed_batches(served: Served, client: httpx.Client) -> None:
    generator = torch.Generator().manual_seed(2)
    inputs = sequences([2, 5, 33, 100, 511, 7, 64, 250, *torch.randint(2, 400, (16,), generator=generator).tolist()], seed=1)
    alone = [score(client, token_ids=ids)["data"][0] for ids in inputs]
    for _ in range(4):
        order = torch.randperm(len(inputs), generator=generator).tolist()
        before = served.server.counters.batches
        mixed = score(client, token_ids=[inputs[i] for i in order])["data"]
        assert served.server.counters.batches - before < len(inputs)
        for place, i in enumerate(order):
            for field in ("logprobs", "entropy"):
                assert mixed[place][field] == alone[i][field]


def test_masked_tokens_are_null_and_change_nothing_else(client: httpx.Client) -> None:
    ids = sequences([20])[0]
    whole, masked = (score(client, token_ids=ids, prompt_length=16, mask=mask)["data"][0] for mask in (None, [1, 0, 1, 0]))
    for field in ("logprobs", "entropy"):
        assert masked[field][1] is None and masked[field][3] is None
        assert masked[field][0] == pytest.approx(whole[field][0], abs=1e-6) and masked[field][2] == pytest.approx(whole[field][2], abs=1e-6)


def test_answers_are_sent_without_waiting_for_an_ack_of_the_head() -> None:
    """asyncio turns Nagle's algorithm off for sockets that say that they speak TCP, and only for those."""
    from mtpctl.web.server import listen

    with listen("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP


def test_a_stream_is_one_line_a_sequence(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/logprobs", json={"token_ids": sequences([10, 400, 20]), "stream": True}) as response:
        lines = [json.loads(line) for line in response.iter_lines()]
    assert sorted(line["index"] for line in lines) == [0, 1, 2]


def test_text_is_encoded_by_the_served_tokenizer(client: httpx.Client) -> None:
    by_text, by_ids = score(client, text="12+30"), score(client, token_ids=list(b"12+30"))
    assert by_text["data"] == by_ids["data"] and by_text["usage"]["total_tokens"] == 5


def test_completions_echo_as_openai_clients_ask(client: httpx.Client, reference: Any) -> None:
    body = {"model": "tiny", "prompt": ["1+2=3", "7"], "echo": True, "max_tokens": 0, "logprobs": 2, "temperature": 0}
    refused = client.post("/v1/completions", json=body)
    assert refused.status_code == 400 and "nothing to score" in refused.json()["error"]["message"]
    answer = client.post("/v1/completions", json={**body, "prompt": "1+2=3"}).json()
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "1+2=3" and logprobs["tokens"] == list("1+2=3") and logprobs["text_offset"] == [0, 1, 2, 3, 4]
    expected = reference(list(b"1+2=3"))
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for place, token in enumerate(b"1+2=3"[1:]):
        assert logprobs["token_logprobs"][place + 1] == pytest.approx(float(expected[place, token]), abs=1e-5)
        assert len(logprobs["top_logprobs"][place + 1]) >= 2
        assert max(logprobs["top_logprobs"][place + 1].values()) == pytest.approx(float(expected[place].max()), abs=1e-5)


def test_completions_with_tokens_as_ids_have_the_offsets_of_the_text(client: httpx.Client) -> None:
    text = "é1☃<eos>x"  # parts of characters, and a special token that the text leaves out
    body = {"prompt": [[*b"\xc3\xa91\xe2\x98\x83", 258, *b"x"]], "echo": True, "max_tokens": 0, "logprobs": 1}
    plain, by_id = (client.post("/v1/completions", json=body | {"return_tokens_as_token_ids": each}).json() for each in (False, True))
    for answer in (plain, by_id):
        (choice,) = answer["choices"]
        assert choice["text"] == text.replace("<eos>", "")
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 2, 2, 3, 3]
        assert choice["logprobs"]["bytes"] == [[0xC3], [0xA9], [0x31], [0xE2], [0x98], [0x83], list(b"<eos>"), [0x78]]
    assert by_id["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in body["prompt"][0]]  # type: ignore[index]
    assert all(name.startswith("token_id:") for row in by_id["choices"][0]["logprobs"]["top_logprobs"][1:] for name in row)
    assert plain["choices"][0]["logprobs"]["tokens"][2] == "1"


@pytest.mark.parametrize("field", [{"suffix": "x"}, {"best_of": 2}, {"stream": True}, {"prompt_logprobs": 1}, {"anything": 1}])
def test_a_field_of_completions_that_is_not_honored_is_rejected_by_name(client: httpx.Client, field: dict[str, Any]) -> None:
    response = client.post("/v1/completions", json={"prompt": "ab", "echo": True, "max_tokens": 0, **field})
    assert response.status_code == 400 and next(iter(field)) in response.json()["error"]["message"]


# ------------------------------------------------------------------------------------------------------ other routes


def test_health_version_metrics_and_the_openapi_page(served: Served, client: httpx.Client) -> None:
    score(client, token_ids=[1, 2, 3])
    with served.client(key=None) as anonymous:
        assert anonymous.get("/health").json()["replicas"][0]["alive"] is True
        assert "/v1/logprobs" in anonymous.get("/openapi.json").json()["paths"]
        assert anonymous.get("/docs").status_code == 200
        assert [anonymous.get(path).status_code for path in ("/version", "/metrics")] == [401, 401]
    assert client.get("/version").json()["available"] == [0]
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list" and [(each["id"], each["object"]) for each in listed["data"]] == [("tiny", "model")]
    values = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    assert float(values["mtpctl_logprob_requests_total"]) >= 1 and float(values["mtpctl_logprob_replicas_alive"]) == 1


# -------------------------------------------------------------------------------------------------- hostile clients


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b'{"token_ids": [1,', 400, "not valid JSON"),
        (b"\xff\xfe", 400, "body"),
        (b"[" * 50_000, 400, "body"),
        (b'{"token_ids": [' + b"9" * 5000 + b", 1]}", 400, "body"),
        (b'{"token_ids": [1, 2], "tokens": 3}', 400, "tokens"),
        (b'{"token_ids": [1, true]}', 400, "valid integer"),
        (b'{"token_ids": [1, 999]}', 400, "999 is not a token"),
        (b'{"token_ids": [1, -1]}', 400, "-1 is not a token"),
        (b'{"token_ids": []}', 400, "nothing to score"),
        (b'{"token_ids": [1, 2], "text": "a"}', 400, "give one of them"),
        (b'{"token_ids": [1, 2], "temperature": NaN}', 400, "temperature"),
        (b'{"token_ids": [1, 2], "temperature": 1e-40}', 400, "temperature: must be 1e-06 to 1e+06, got 1e-40"),
        (b'{"token_ids": [1, 2], "temperature": 1e40}', 400, "temperature: must be 1e-06 to 1e+06"),
        (b'{"text": "\\ud800"}', 400, "text: lone surrogate at character 0"),
        (b'{"token_ids": [1, 2], "top_logprobs": 1000}', 400, "top_logprobs"),
        (b'{"token_ids": [1, 2], "mask": [2]}', 400, "mask"),
        (b'{"token_ids": [[1, 2], [3, 4]], "mask": [[1]]}', 400, "mask: has 1 entries for 2"),
        (b'{"token_ids": [1, 2], "at_least": 99, "timeout_s": 0.05}', 504, "the newest weights are 0"),
        (json.dumps({"token_ids": [[1] * 500] * 100}).encode(), 400, "more than the 20000 that may wait"),
        (json.dumps({"token_ids": [[1, 2]] * 1025}).encode(), 400, "1025 sequences"),
        (b'{"token_ids": [' + b"1," * 10_000_000 + b"1]}", 413, "bytes"),
    ],
)
def test_invalid_requests_are_rejected_with_a_reason(client: httpx.Client, body: bytes, status: int, reason: str) -> None:
    response = client.post("/v1/logprobs", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert reason in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_failed_pass_is_reported_like_other_errors(stream: bool) -> None:
    async def drive() -> httpx.Response:
        server = await serve(Started(poison=310))
        app = make_app(server, None, "tiny", bounds=BOUNDS)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://here") as client:
            answer = await client.post("/v1/logprobs", json={"token_ids": [1, 310], "stream": stream})
        await server.close()
        return answer

    answer = asyncio.run(drive())
    assert answer.status_code == (200 if stream else 503)
    assert answer.json()["error"] == {"message": "scoring the request failed: ValueError: not a number", "type": "server_error"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": "ab", "max_tokens": 4, "echo": True}, "does not generate"),
        ({"prompt": "ab"}, "does not generate"),
        ({"prompt": "ab", "echo": True, "max_tokens": 0, "n": 2}, "one whole answer"),
    ],
)
def test_this_server_does_not_generate(client: httpx.Client, body: dict[str, Any], reason: str) -> None:
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400 and reason in response.json()["error"]["message"]


def test_requests_without_the_key_are_not_read(served: Served) -> None:
    for key in (None, "wrong", KEY[:-1]):
        with served.client(key) as stranger:
            response = stranger.post("/v1/logprobs", json={"token_ids": [1, 2]})
            assert response.status_code == 401 and KEY not in response.text


def test_a_body_of_unknown_length_is_bounded_too(client: httpx.Client) -> None:
    response = client.post("/v1/logprobs", content=(b"1," * 32768 for _ in range(64)))
    assert response.status_code == 413


def test_slow_clients_are_disconnected_without_delaying_others(served: Served, client: httpx.Client) -> None:
    head = f"POST /v1/logprobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 50\r\n\r\n{{".encode()
    with socket.create_connection(("127.0.0.1", served.port)) as silent, socket.create_connection(("127.0.0.1", served.port)) as slow:
        slow.sendall(head)
        began = time.monotonic()
        score(client, token_ids=[1, 2, 3])
        assert time.monotonic() - began < BOUNDS.header_s
        silent.settimeout(5)
        slow.settimeout(5)
        assert silent.recv(100) == b""
        assert b" 408 " in slow.recv(100)


def test_dropped_connections_are_released(served: Served, client: httpx.Client) -> None:
    head = f"POST /v1/logprobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 50\r\n\r\n{{".encode()
    for number in range(300):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            if number % 2:
                connection.sendall(head)
    score(client, token_ids=[1, 2, 3])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (len(served._web.server_state.connections) > 2 or served.server.queue.requests):
        time.sleep(0.02)
    assert len(served._web.server_state.connections) <= 2 and served.server.queue.requests == 0


def test_disconnected_client_frees_its_slot(served: Served, client: httpx.Client) -> None:
    served.call(served.server.dispatcher.pause())
    try:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/logprobs", json={"token_ids": sequences([500, 500])}, timeout=0.2)
        deadline = time.monotonic() + 5
        while served.server.queue.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        assert served.server.queue.requests == 0
    finally:
        served.loop.call_soon_threadsafe(served.server.dispatcher.resume)


def test_full_queue_returns_a_retry_delay(served: Served, client: httpx.Client) -> None:
    served.call(served.server.dispatcher.pause())
    refused = served.server.counters.queue_full
    answers: list[int] = []
    clients = [
        threading.Thread(target=lambda: answers.append(client.post("/v1/logprobs", json={"token_ids": [[1] * 500] * 13}).status_code))
        for _ in range(3)
    ]
    try:
        for one in clients:
            one.start()
        deadline = time.monotonic() + 10
        while served.server.queue.tokens < 19_500 and time.monotonic() < deadline:
            time.sleep(0.01)
        response = client.post("/v1/logprobs", json={"token_ids": [1] * 512})
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert served.server.counters.queue_full == refused + 1
    finally:
        served.loop.call_soon_threadsafe(served.server.dispatcher.resume)
    for one in clients:
        one.join(30)
    assert answers == [200, 200, 200]


@pytest.mark.parametrize(("kind", "said"), [(None, "got none"), ("text/plain", "got text/plain")])
def test_request_with_another_content_type_gets_an_error_with_the_required_header(
    client: httpx.Client, kind: str | None, said: str
) -> None:
    request = client.build_request("POST", "/v1/logprobs", content='{"token_ids": [1, 2]}')
    request.headers.pop("content-type", None)
    if kind:
        request.headers["content-type"] = kind
    response = client.send(request)
    assert response.status_code == 415
    message = f"content-type: must be application/json, {said}; send the header 'content-type: application/json'"
    assert response.json()["error"]["message"] == message
