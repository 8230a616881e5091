"""Chat messages behind a turn of the model: the template's own text, and the model's tokens as they were."""

from __future__ import annotations

import pytest

from mtpctl.data.tokenizers import HfTokenizer
from mtpctl.environments.environment import EnvironmentFailure
from mtpctl.environments.turns import ChatReplies
from tests.fakes.chat_families import FAMILIES, Family, tokenizer_of

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, HfTokenizer]:
    return {family.name: tokenizer_of(family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_template_text_between_turns_is_appended(family: Family, tokenizers: dict[str, HfTokenizer]) -> None:
    tokenizer = tokenizers[family.name]
    replies = ChatReplies(tokenizer)
    for roles in family.replies:
        messages = [{"role": role, "content": f"{number}: see"} for number, role in enumerate(roles)]
        expected = tokenizer.encode(family.behind(messages))
        assert replies.tokens(messages, None) == expected
        for token in tokenizer.encode("".join(family.ends)):
            assert replies.tokens(messages, token) == (expected[1:] if token == expected[0] else expected)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_rendered_reply_equals_the_template_of_the_whole_conversation(family: Family, tokenizers: dict[str, HfTokenizer]) -> None:
    """Where the model wrote what the template would have tokenised, and the template changes nothing in it."""
    tokenizer = tokenizers[family.name]
    question, answer = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}
    messages = [{"role": role, "content": "and then?"} for role in family.replies[-1]]
    whole = tokenizer.chat([question, answer, *messages])
    behind = ChatReplies(tokenizer).tokens(messages, None)
    assert whole[-len(behind) :] == behind
    assert tokenizer.decode(whole[: -len(behind)]).endswith("so")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}[Round {{ loop.index }}]{{ m.content }}{% endfor %}",
            "messages differently after another",
        ),
        ("{{ messages[-1].content }}", "leaves an earlier turn of the model out or changes it"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "leaves an earlier turn of the model out or changes it"),
        ("{{ raise_exception('no tools here') }}", r"rejects a conversation of .* \(no tools here"),
    ],
)
def test_template_that_renders_more_than_the_new_messages_is_rejected(template: str, message: str) -> None:
    tokenizer = tokenizer_of(BY_NAME["chatml"])
    tokenizer.inner.chat_template = template
    with pytest.raises(EnvironmentFailure, match=message) as caught:
        ChatReplies(tokenizer).tokens([{"role": "user", "content": "x"}], None)
    assert "\n" not in str(caught.value)


def test_tools_are_in_the_prompt_and_nowhere_else(tokenizers: dict[str, HfTokenizer]) -> None:
    tokenizer = tokenizers["mistral"]
    tool = {"type": "function", "function": {"name": "echo", "parameters": {"type": "object", "properties": {}}}}
    question = [{"role": "user", "content": "why?"}]
    text = tokenizer.inner.decode(tokenizer.chat(question, [tool]))
    assert "[AVAILABLE_TOOLS]" in text and '"echo"' in text
    assert "[AVAILABLE_TOOLS]" not in tokenizer.inner.decode(tokenizer.chat(question))
    assert ChatReplies(tokenizer).tokens(question, None) == tokenizer.encode("</s>[INST] why?[/INST]")
