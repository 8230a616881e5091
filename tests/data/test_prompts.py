"""Prompts and targets as ids, and what does not fit the context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtpctl.data import prompts
from mtpctl.data.problems import Problem
from mtpctl.data.prompts import check_lengths, encode_prompt, encode_sft, encode_target, with_hint
from mtpctl.data.tokenizers import Tokenizer, load_tokenizer, make_byte_tokenizer
from mtpctl.errors import UserError
from mtpctl.recipe.data import DataConfig

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("byte")
    make_byte_tokenizer(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def test_prompt_and_target_are_encoded_without_a_template(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    problem = Problem("p", "1+2=", "3", "1+2+0=03 #3")
    assert encode_prompt(tokenizer, problem, DataConfig()) == list(b"1+2=")
    assert encode_target(tokenizer, problem) == [*b"1+2+0=03 #3", 258]
    assert encode_target(tokenizer, Problem("p", "1+2=", "3")) == [*b"3", 258]


def test_chat_template_with_a_system_prompt(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    problem = Problem("p", "1+2=", "3")
    assert encode_prompt(tokenizer, problem, DataConfig(chat_template=True)) == list(b"[user]1+2=[assistant]")
    config = DataConfig(chat_template=True, system_prompt="Add.")
    assert encode_prompt(tokenizer, problem, config) == list(b"[system]Add.[user]1+2=[assistant]")


def test_tools_are_rendered_by_the_chat_template_and_count_as_prompt_tokens(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}" + TEMPLATE)
    tokenizer, problem = load_tokenizer(tmp_path), Problem("p", "1+2=", "3")
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    config = DataConfig(chat_template=True)
    assert encode_prompt(tokenizer, problem, config, [tool]) == list(b"<add>[user]1+2=[assistant]")
    assert encode_prompt(tokenizer, problem, config) == list(b"[user]1+2=[assistant]")
    with pytest.raises(UserError, match=r"the prompt has 26 tokens"):
        check_lengths(tokenizer, [problem], config, context=26, tools=[tool])


def test_problem_beyond_context_is_reported(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    problems = [Problem("d.jsonl:1", "1=", "1"), Problem("d.jsonl:2", "12345678=", "1")]
    check_lengths(tokenizer, problems, DataConfig(), context=10)
    check_lengths(tokenizer, problems, DataConfig(), context=11, targets=True)
    with pytest.raises(UserError, match=r"d\.jsonl:2: the prompt has 9 tokens, .* the context has 9"):
        check_lengths(tokenizer, problems, DataConfig(), context=9)
    with pytest.raises(UserError, match=r"d\.jsonl:2: prompt and solution have 11 tokens"):
        check_lengths(tokenizer, problems, DataConfig(), context=10, targets=True)


def test_only_prompts_that_may_be_too_long_are_encoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token per character of ASCII text at most: with the template's 17 tokens, 30 characters fit into 64 tokens for certain."""
    encoded: list[str] = []

    def counted(tokenizer: Tokenizer, problem: Problem, *rest: Any) -> list[int]:
        encoded.append(problem.prompt)
        return encode_prompt(tokenizer, problem, *rest)

    monkeypatch.setattr(prompts, "encode_prompt", counted)
    config, tokenizer = DataConfig(chat_template=True), load_tokenizer(folder)
    texts = ["1" * 30] * 20 + ["é" * 5, "2" * 46]
    check_lengths(tokenizer, [Problem(f"p{i}", text, "3") for i, text in enumerate(texts)], config, context=64)
    assert encoded == ["a", prompts._ESCAPED_PROMPT, "é" * 5, "2" * 46]
    encoded.clear()
    problems = [Problem(f"p{i}", "1" * 10, answer) for i, answer in enumerate(["2" * 10, "2" * 36, "é"])]
    check_lengths(tokenizer, problems, config, context=64, targets=True)
    assert encoded == ["a", prompts._ESCAPED_PROMPT, *["1" * 10] * 2], "prompts whose target fits for certain are not encoded"
    with pytest.raises(UserError, match=r"p1: the prompt has 64 tokens, .* the context has 64"):
        check_lengths(tokenizer, [Problem("p0", "1", "3"), Problem("p1", "é" * 23 + "1", "3")], config, context=64)


@pytest.mark.parametrize("content", ["{{ message.content | tojson }}", "{{ message.content }}{{ message.content }}"])
def test_lengths_are_checked_after_the_template_is_applied(tmp_path: Path, content: str) -> None:
    """40 quotes become 82 characters, or 80."""
    make_byte_tokenizer(folder := tmp_path)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}" + content + "{% endfor %}")
    config, tokenizer = DataConfig(chat_template=True), load_tokenizer(folder)
    with pytest.raises(UserError, match=r"^p1: the prompt has 8\d tokens, .* the context has 64"):
        check_lengths(tokenizer, [Problem("p0", "1", "3"), Problem("p1", '"' * 40, "3")], config, context=64)


def test_a_conversation_has_the_environments_tools(tmp_path: Path) -> None:
    """As the prompts of RL have."""
    make_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}" + TEMPLATE)
    messages = ({"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"})
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    sample = encode_sft(load_tokenizer(tmp_path), Problem("p", "", "", messages=messages), DataConfig(chat_template=True), [tool])
    assert bytes(sample[0]) == b"<add>[user]1+2=[assistant]"


@pytest.mark.parametrize("hint", ["{level:>3}", "{meta[x]}", "{missing}"])
def test_a_hint_that_does_not_fit_a_row_names_the_row(hint: str) -> None:
    problem = Problem("d.jsonl:4", "1+2=", "3", fields={"level": None, "meta": "text"})
    with pytest.raises(UserError, match=r"train\.rl\.teacher\.hint: .* cannot be formatted for d\.jsonl:4"):
        with_hint(problem, hint)
