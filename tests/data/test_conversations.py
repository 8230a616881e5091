"""Whole conversations: the assistant's turns are trained on, to the token, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtpctl.data.problems import Problem
from mtpctl.data.prompts import check_lengths, encode_conversation, encode_prompt, encode_sft
from mtpctl.data.tokenizers import Tokenizer, load_tokenizer, make_byte_tokenizer
from mtpctl.errors import UserError
from mtpctl.recipe.data import DataConfig

CHATML = (
    "{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_OTHERWISE = PLAIN.replace("[assistant]{% endif %}", "[assistant]<think>{% endif %}")


def tokenizer_of(folder: Path, template: str | None) -> Tokenizer:
    """The byte tokenizer with ChatML's two tokens, and a template."""
    import tokenizers

    make_byte_tokenizer(folder, chat=False)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    inner.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("chatml"), CHATML)


def talk(*contents: str, **fields: Any) -> Problem:
    """A conversation in which user and assistant take turns."""
    messages = [{"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(contents)]
    return Problem("c.jsonl:1", "", "", messages=messages, fields=fields)


def trained(tokenizer: Tokenizer, problem: Problem, config: DataConfig | None = None) -> tuple[str, list[str]]:
    """The whole text, and the trained runs in it, special tokens included."""
    inner = tokenizer.inner  # type: ignore[attr-defined]
    prompt, target, mask = encode_sft(tokenizer, problem, config or DataConfig())
    runs: list[list[int]] = [[]]
    for token, one in zip(target, mask, strict=True):
        if one:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return inner.decode([*prompt, *target]), [inner.decode(run) for run in runs if run]


def test_every_turn_of_the_assistant_is_trained_on_with_the_token_that_ends_it(chatml: Tokenizer) -> None:
    text, turns = trained(chatml, talk("1+1?", "2", "2+2?", "4 é😀"))
    assert turns == ["2<|im_end|>", "4 é😀<|im_end|>"]
    assert text == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4 é😀<|im_end|>"
    )


def test_ids_equal_those_of_the_template(chatml: Tokenizer) -> None:
    problem = talk("1+1?", "2", "2+2?", "4")
    prompt, target, _ = encode_conversation(chatml, problem)
    assert [*prompt, *target, *b"\n"] == chatml.encode(chatml.chat_text(problem.messages, add_generation_prompt=False))
    assert prompt == chatml.chat(problem.messages[:1])


@given(
    contents=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), min_size=2, max_size=8).filter(
        lambda c: not len(c) % 2
    )
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mask_covers_only_assistant_text(chatml: Tokenizer, contents: list[str]) -> None:
    if any("<" in content for content in contents):
        return
    _, turns = trained(chatml, talk(*contents))
    assert turns == [f"{content}<|im_end|>" for content in contents[1::2]]


def test_a_system_prompt_of_the_recipe_goes_before_a_conversation_without_one(chatml: Tokenizer) -> None:
    config = DataConfig(chat_template=True, system_prompt="Add.")
    text, turns = trained(chatml, talk("1+1?", "2"), config)
    assert text.startswith("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user") and turns == ["2<|im_end|>"]
    own = Problem("c", "", "", messages=[{"role": "system", "content": "Be brief."}, *talk("1+1?", "2").messages])
    assert "Add." not in trained(chatml, own, config)[0]


def test_tools_of_the_row_go_to_the_template(chatml: Tokenizer) -> None:
    text, turns = trained(chatml, talk("1+1?", "2", tools=[{"name": "add"}]))
    assert text.startswith('<|im_start|>tools [{"name": "add"}]<|im_end|>') and turns == ["2<|im_end|>"]
    requested = Problem("c", "1+1?", "2", messages=[{"role": "user", "content": "1+1?"}], fields={"tools": [{"name": "add"}]})
    assert b'"add"' in bytes(token for token in encode_prompt(chatml, requested, DataConfig()) if token < 256)


def test_a_turn_of_weight_0_is_read_and_not_trained_on(chatml: Tokenizer) -> None:
    problem = talk("1+1?", "3", "no", "2")
    problem.messages[1]["weight"] = 0  # type: ignore[index]
    assert trained(chatml, problem)[1] == ["2<|im_end|>"]
    problem.messages[3]["weight"] = 0  # type: ignore[index]
    with pytest.raises(UserError, match=r"^c\.jsonl:1: no assistant turn is trained"):
        encode_conversation(chatml, problem)


def test_tool_messages_are_not_trained(chatml: Tokenizer) -> None:
    messages = [*talk("1+1?", "add(1, 1)").messages, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}]
    assert trained(chatml, Problem("c", "", "", messages=messages))[1] == ["add(1, 1)<|im_end|>", "It is 2.<|im_end|>"]


def test_end_token_is_appended_if_template_does_not_close_turns(tmp_path: Path) -> None:
    _, turns = trained(tokenizer_of(tmp_path, PLAIN), talk("1+1?", "2", "2+2?", "4 "))
    assert turns == ["2", "4 <eos>"]


@pytest.mark.parametrize(
    ("template", "contents", "message"),
    [
        (FORGETS, ["1+1?", "<think>hm</think>2", "2+2?", "4"], r"changes turns when others follow \(message 2, near "),
        (
            OPENS_OTHERWISE,
            ["1+1?", "2"],
            r"does not begin an assistant's turn with its generation prompt \(message 2, near 'user\]1\+1\?\[assistant\]2'",
        ),
    ],
)
def test_template_that_changes_turns_is_rejected(tmp_path: Path, template: str, contents: list[str], message: str) -> None:
    with pytest.raises(UserError, match=rf"^c\.jsonl:1: the chat template of .* {message}") as caught:
        encode_conversation(tokenizer_of(tmp_path, template), talk(*contents))
    assert "\n" not in str(caught.value)


def test_same_template_is_accepted_without_later_turns(tmp_path: Path) -> None:
    assert trained(tokenizer_of(tmp_path, FORGETS), talk("1+1?", "<think>hm</think>2"))[1] == ["<think>hm</think>2<|im_end|>"]


def test_a_tokenizer_without_a_template_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.chat_template: the tokenizer .* has no chat template") as caught:
        encode_conversation(tokenizer_of(tmp_path, None), talk("1+1?", "2"))
    assert "\n" not in str(caught.value)


def test_a_conversation_that_begins_with_the_assistant_is_refused(chatml: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"^c: the conversation begins with the assistant"):
        encode_conversation(chatml, Problem("c", "", "", messages=[{"role": "assistant", "content": "hello"}]))


def test_a_conversation_longer_than_the_context_is_named(chatml: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"^c\.jsonl:1: the conversation has \d+ tokens; the context has 20 tokens"):
        check_lengths(chatml, [talk("1+1?", "2")], DataConfig(), context=20, targets=True)


def test_chat_messages_are_rendered_with_the_template_regardless_of_the_recipe(chatml: Tokenizer) -> None:
    problem = Problem("p", "1+1?", "2", messages=[{"role": "user", "content": "1+1?"}])
    ids = encode_prompt(chatml, problem, DataConfig(chat_template=False))
    assert ids == chatml.encode("<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n")
    assert json.dumps(problem.to_json())
