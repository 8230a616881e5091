"""RowSource of OpenAI's and ShareGPT's forms, from JSON and Parquet, as chat templates see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mtpctl.data.problems import Problem
from mtpctl.data.prompts import encode_prompt, encode_sft
from mtpctl.data.sets import RowReader, RowSource
from mtpctl.data.tokenizers import HfTokenizer, load_tokenizer
from mtpctl.errors import UserError
from mtpctl.recipe.data import ColumnsConfig, DataConfig
from tests.fakes.chat_families import FAMILIES, tokenizer_of

ASK = {"role": "user", "content": "Weather?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
ARGUMENTS = {"city": "Köln", "days": None}
# As Qwen's and Llama's: the arguments are serialized; and as DeepSeek's: they are joined as text.
SERIALIZES = (
    "{% for t in tools or [] %}<tool>{{ t | tojson }}</tool>{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JOINS = SERIALIZES.replace(
    "{{ c.function.name }} {{ c.function.arguments | tojson }}", "{{ c.function.name + ' ' + c.function.arguments }}"
)
PRINTS = SERIALIZES.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}")
BRANCHES = SERIALIZES.replace(
    "{{ c.function.arguments | tojson }}",
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}",
)


def chatml(template: str = SERIALIZES, **options: Any) -> HfTokenizer:
    tokenizer = tokenizer_of(next(family for family in FAMILIES if family.name == "chatml"))
    tokenizer.inner.chat_template = template
    return HfTokenizer(tokenizer.inner, "chatml", **options)


def read(path: Path, *rows: dict[str, Any], supervised: bool = True, **columns: str | None) -> list[Problem]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RowSource(str(path), RowReader(ColumnsConfig.model_validate(columns), supervised=supervised)).read()


def text_of(tokenizer: HfTokenizer, problem: Problem) -> str:
    prompt, target, _ = encode_sft(tokenizer, problem, DataConfig())
    return tokenizer.decode([*prompt, *target], special=True)


def calling(arguments: object, **fields: object) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [ASK, {"role": "assistant", "content": None, "tool_calls": [call], **fields}, {"role": "tool", "content": "12"}, SAY]


SAY = {"role": "assistant", "content": "12 degrees."}


@pytest.mark.parametrize("template", [SERIALIZES, JOINS, PRINTS, BRANCHES])
@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS, ensure_ascii=False), json.dumps(ARGUMENTS)])
def test_arguments_as_json_text_or_object_are_encoded_once_by_every_kind_of_template(
    tmp_path: Path, template: str, arguments: object
) -> None:
    (problem,) = read(tmp_path / "r.jsonl", {"messages": calling(arguments)})
    written = text_of(chatml(template), problem).partition("<call>look ")[2].partition("</call>")[0]
    assert json.loads(written) == ARGUMENTS


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(tmp_path: Path, arguments: object) -> None:
    (problem,) = read(tmp_path / "r.jsonl", {"messages": calling(arguments)})
    assert "<call>look {}</call>" in text_of(chatml(), problem)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (calling("{city"), r"the arguments of the call of 'look' in message 2 of `messages` must be an object, or the JSON text of one"),
        (calling("[1]"), r"the arguments of the call of 'look' in message 2"),
        (calling('{"a": "\\ud800"}'), r"message 2 of `messages` contains a lone surrogate"),
        ([ASK, {"role": "assistant", "tool_calls": {"a": 1}}, SAY], r"`tool_calls` of message 2 of `messages` must be a list of calls"),
        ([ASK, {"role": "assistant", "tool_calls": ["look"]}, SAY], r"a tool call of message 2 of `messages` must be an object"),
        (
            [{"role": "user", "content": [{"type": "input_audio", "x": 1}]}, SAY],
            r"message 1 of `messages` has parts of the type input_audio",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}, 3]}, SAY],
            r"message 1 of `messages` has parts of the type text without text, int",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}, SAY], r"`messages` contains images, .*\(parts of the type image_url\)"),
        (
            [{"role": "user", "content": {"a": 1}}, SAY],
            r"`content` of message 1 of `messages` must be non-empty text, got an object",
        ),
        ([{"from": "narrator", "value": "a"}, SAY], r"message 1 of `messages` is from 'narrator'; the sender must be one of human, "),
        ([ASK, {"from": "function_call", "value": "look()"}, SAY], r"message 2 of `messages` must be a call, the JSON text of"),
        ([ASK, None, SAY], r"message 2 of `messages` must be an object"),
    ],
)
def test_an_invalid_message_is_rejected_with_its_line(tmp_path: Path, messages: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"^{tmp_path}/r\.jsonl:2: {message}") as caught:
        read(tmp_path / "r.jsonl", {"messages": [ASK, SAY]}, {"messages": messages})
    assert "\n" not in str(caught.value)


def test_content_as_text_parts_is_one_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Wea"}, "th", {"text": "er?", "image_url": None}, None]
    (problem,) = read(tmp_path / "r.jsonl", {"messages": [{"role": "user", "content": parts}, SAY]})
    assert [*problem.messages] == [ASK, SAY] and problem.prompt.startswith("[user]\nWeather?")
    requested = Problem("p", "", "", messages=[{"role": "user", "content": parts}])
    assert encode_prompt(chatml(), requested, DataConfig()) == encode_prompt(chatml(), Problem("p", "", "", messages=[ASK]), DataConfig())


def test_nulls_from_parquet_are_absent_fields_except_in_arguments(tmp_path: Path) -> None:
    """Two tools and two calls with other fields each: Arrow's structs have the fields of both."""
    other = {
        "type": "function",
        "function": {"name": "sum", "description": "Adds.", "parameters": {"properties": {"a": {"enum": ["1", None]}}}},
    }
    calls = [
        {"id": "1", "function": {"name": "look", "arguments": {"city": "Rome", "days": None}}, "index": None},
        {"id": None, "function": {"name": "sum", "arguments": {"city": None, "days": 3}}, "index": 2},
    ]
    row = {
        "messages": [ASK, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "1", "name": "x"}, SAY]
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**row, "tools": [TOOL, other]}]), tmp_path / "r.parquet")
    (problem,) = RowSource(str(tmp_path / "r.parquet"), RowReader(ColumnsConfig(), supervised=True)).read()
    assert problem.tools == [TOOL, other]
    said = problem.messages[1]["tool_calls"]
    assert isinstance(said, list) and [call["function"]["arguments"] for call in said] == [
        {"city": "Rome", "days": None},
        {"city": None, "days": 3},
    ]
    assert "index" not in said[0] and "id" not in said[1] and "name" not in problem.messages[0]
    text = text_of(chatml(), problem)
    assert "None" not in text and text.count("null") == 3, "one in the enum, and one in each call"


def test_tools_as_json_text_of_the_list_or_of_each_are_the_same(tmp_path: Path) -> None:
    rows = [{"messages": [ASK, SAY], "tools": tools} for tools in ([TOOL], json.dumps([TOOL]), [json.dumps(TOOL)])]
    assert [problem.tools for problem in read(tmp_path / "r.jsonl", *rows)] == [[TOOL]] * 3
    assert [list(problem.tools or ()) for problem in read(tmp_path / "n.jsonl", rows[0] | {"tools": "null"}, rows[0] | {"tools": ""})] == [
        [],
        [],
    ]


def test_sharegpt_rows_are_conversations(tmp_path: Path) -> None:
    said = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": '{"name": "look", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "12"},
        {"from": "gpt", "value": "12 degrees.", "weight": 1, "role": None},
    ]
    (problem,) = read(tmp_path / "r.jsonl", {"conversations": said, "tools": json.dumps([TOOL])})
    assert [message["role"] for message in problem.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [message["content"] for message in problem.messages] == ["Be brief.", "Weather?", "", "12", "12 degrees."]
    assert '<call>look {"city": "Rome"}</call><|im_end|>' in text_of(chatml(), problem)
    listed = {"conversations": {"from": ["human", "gpt"], "value": ["Weather?", "12 degrees."]}}
    assert [*read(tmp_path / "l.jsonl", listed)[0].messages] == [ASK, SAY]


def test_openais_older_function_call_is_a_tool_call(tmp_path: Path) -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}
    (problem,) = read(tmp_path / "r.jsonl", {"messages": [ASK, old, {"role": "tool", "content": "1"}, SAY]})
    assert "<call>look {}</call>" in text_of(chatml(), problem)


@pytest.mark.parametrize("content", ["", None, []])
def test_empty_system_message_replaces_the_default_one(tmp_path: Path, content: object) -> None:
    (problem,) = read(tmp_path / "r.jsonl", {"messages": [{"role": "system", "content": content}, ASK, SAY]})
    prompt, _, _ = encode_sft(chatml(), problem, DataConfig(chat_template=True, system_prompt="Add."))
    assert chatml().decode(prompt, special=True).startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user")


def test_repeated_roles_are_accepted_or_rejected_with_their_line_as_the_template_does(tmp_path: Path) -> None:
    (problem,) = read(tmp_path / "r.jsonl", {"messages": [ASK, ASK, SAY, SAY]})
    assert text_of(chatml(), problem).count("12 degrees.<|im_end|>") == 2
    mistral = tokenizer_of(next(family for family in FAMILIES if family.name == "mistral"))
    with pytest.raises(UserError, match=r"^r\.jsonl:1: data\.chat_template: the template of mistral rejects .*must alternate") as caught:
        encode_sft(mistral, problem, DataConfig())
    assert "system_prompt" not in str(caught.value)
    (leading,) = read(tmp_path / "l.jsonl", {"messages": [SAY, ASK, SAY]})
    with pytest.raises(UserError, match=r"^l\.jsonl:1: the conversation begins with the assistant"):
        encode_sft(chatml(), leading, DataConfig())


TALKS = "{% for m in messages if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (Problem("r:7", "", "", messages=[ASK], fields={"tools": [TOOL]}), "drops the tools; .*set data.ignore_tools: true"),
        (Problem("r:7", "", "", messages=calling({})), "drops tool calls; .*set data.ignore_tools: true"),
        (Problem("r:7", "", "", messages=[{"role": "system", "content": "x"}, ASK]), "drops messages of the role 'system'"),
        (Problem("r:7", "", "", messages=[ASK, SAY, {"role": "tool", "content": "x"}]), "drops messages of the role 'tool'"),
    ],
)
def test_parts_that_the_template_drops_are_rejected_with_their_row(problem: Problem, message: str) -> None:
    with pytest.raises(UserError, match=rf"^r:7: data\.chat_template: the template of chatml {message}") as caught:
        encode_sft(chatml(TALKS), problem, DataConfig())
    assert "\n" not in str(caught.value)


def test_ignore_tools_accepts_tools_that_the_template_drops() -> None:
    tokenizer = chatml(TALKS, ignore_tools=True)
    problem = Problem("r:7", "", "", messages=[ASK], fields={"tools": [TOOL]})
    assert tokenizer.decode(encode_prompt(tokenizer, problem, DataConfig())) == "[user]Weather?"


@pytest.mark.parametrize("prefix", ["<bos>", "<bos> <eos>"])
def test_a_text_that_begins_with_bos_gets_no_second_one(tmp_path: Path, prefix: str) -> None:
    import tokenizers
    from tokenizers import processors

    from mtpctl.data.tokenizers import make_byte_tokenizer

    make_byte_tokenizer(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    single = " ".join(["<bos>", "$A", *prefix.split()[1:]])
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<bos>", 257), ("<eos>", 258)])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<bos>7=", special=True) == tokenizer.encode("7=", special=True) == [257, *b"7="]
    assert tokenizer.encode("", special=True) == [257]
    assert tokenizer.encode("7=<eos>", special=True) == [257, *b"7=", 258]
