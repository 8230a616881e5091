"""Token ids of a problem: its prompt, and the target of the supervised stage.

A conversation of the supervised stage is rendered once by the tokenizer's chat template, and this text is tokenized once. To locate an
assistant turn, the messages before it are also rendered, with and without the turn. Both texts must be prefixes of the whole text; the turn
is their difference. The tokens that start in the turn are trained, up to the token that ends it. The template's header before a turn and
its line break after it are not trained, because a model does not generate them.

The token that ends a turn is one of the run's end tokens. In some templates, the header of the next role ends the turn. Then the first
token of this header is trained with the turn, and an end token is appended after the last turn.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from mtpctl.data.end_tokens import EndTokens, end_tokens, is_blank
from mtpctl.data.messages import NotRendered, has_droppable_parts
from mtpctl.data.problems import Message, Problem
from mtpctl.data.tokenizers import Tokenizer
from mtpctl.errors import UserError
from mtpctl.recipe.data import DataConfig

_BOUNDARY_TOKENS = 8
"""Allowance in tokens: text may be split differently where a prompt or target meets the text around it."""
_ESCAPED_PROMPT = '"\n\\<' * 16
"""A prompt of characters that JSON or HTML escapes, to detect a template that escapes or repeats its input."""


class SftSample(NamedTuple):
    """One sample of the supervised stage: ids of the prompt, ids of the target, and the target's loss mask."""

    prompt: list[int]
    target: list[int]
    mask: list[int]


def encode_prompt(tokenizer: Tokenizer, problem: Problem, config: DataConfig, tools: Sequence[object] = ()) -> list[int]:
    """Ids of the prompt. Chat messages, and with `data.chat_template` all prompts, are rendered with the chat template.

    A conversation without a system message gets the recipe's. `tools`: JSON schemas of the environment's tools, in addition to those of the
    row. Raises UserError with the row if the template rejects or drops a part.
    """
    if not problem.messages and not config.chat_template:
        return tokenizer.encode(problem.prompt, special=True)
    messages = problem.messages or [{"role": "user", "content": problem.prompt}]
    try:
        return tokenizer.chat([*_system_message(problem, config), *messages], [*(problem.tools or ()), *tools])
    except NotRendered as error:
        raise UserError(f"{problem.prompt_id}: {error}") from error


def uses_chat_template(config: DataConfig, problems: Iterable[Problem]) -> bool:
    """Whether the chat template is used, because the recipe sets it or one of the problems is a conversation."""
    return config.chat_template or any(problem.messages for problem in problems)


def with_hint(problem: Problem, hint: str) -> Problem:
    """Replace the prompt, or the last user message, by `hint` (`train.rl.teacher.hint`).

    In the hint, `{prompt}`, `{answer}`, `{solution}` and the row's other columns in braces are replaced by the values. Raises UserError
    for a missing column.
    """
    messages = [dict(message) for message in problem.messages]
    question = next((message for message in reversed(messages) if message.get("role") == "user"), None)
    prompt = str(question.get("content", "")) if question is not None else problem.prompt
    fields = {**problem.fields, "prompt": prompt, "answer": problem.answer, "solution": problem.target}
    try:
        text = string.Formatter().vformat(hint, (), fields)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        columns = ", ".join(sorted(fields))
        raise UserError(
            f"train.rl.teacher.hint: {hint!r} cannot be formatted for {problem.prompt_id} ({error}); available are {columns}"
        ) from error
    if question is not None:
        question["content"] = text
    return replace(problem, prompt=text, messages=tuple(messages))


def encode_target(tokenizer: Tokenizer, problem: Problem, ends: EndTokens | None = None, *, templated: bool = False) -> list[int]:
    """Ids of the target of the supervised stage. An end token is appended, unless the target ends with a special token in `ends`.

    ends: the run's end tokens; default: always append EOS. templated: the prompt is rendered with the chat template.
    """
    ids = tokenizer.encode(problem.target)
    if ends is None:
        return [*ids, tokenizer.eos_id]
    if ids and ids[-1] in ends.ids and ids[-1] in tokenizer.special_ids:
        return ids
    return [*ids, ends.token_to_append(templated=templated)]


def encode_sft(
    tokenizer: Tokenizer, problem: Problem, config: DataConfig, tools: Sequence[object] = (), ends: EndTokens | None = None
) -> SftSample:
    """The sample of the supervised stage: a conversation with its assistant turns as targets, or prompt and target."""
    if problem.is_conversation:
        return encode_conversation(tokenizer, problem, _system_message(problem, config), tools, ends)
    target = encode_target(tokenizer, problem, ends, templated=bool(problem.messages) or config.chat_template)
    return SftSample(encode_prompt(tokenizer, problem, config, tools), target, [1] * len(target))


def _system_message(problem: Problem, config: DataConfig) -> list[Message]:
    """The recipe's system message; none if the conversation begins with a system message."""
    if config.system_prompt is None or (problem.messages and problem.messages[0]["role"] in ("system", "developer")):
        return []
    return [{"role": "system", "content": config.system_prompt}]


def check_lengths(
    tokenizer: Tokenizer,
    problems: Iterable[Problem],
    config: DataConfig,
    *,
    context: int,
    targets: bool = False,
    tools: Sequence[object] = (),
    ends: EndTokens | None = None,
) -> None:
    """Raise UserError for the first prompt that leaves no room for a response in `context` tokens.

    With `targets`, also raise it for the first prompt and solution, or conversation, that exceeds `context`. To save time, plain ASCII rows
    that would fit with one token per character are not encoded.
    """
    template_length: float | None = None
    for problem in problems:
        target = problem.target if targets else ""
        if not problem.messages and not problem.tools and problem.prompt.isascii() and target.isascii():
            if template_length is None:
                template_length = len(encode_prompt(tokenizer, replace(problem, prompt="a"), config, tools)) + _BOUNDARY_TOKENS
                # A template may repeat the prompt or escape its characters.
                if len(encode_prompt(tokenizer, replace(problem, prompt=_ESCAPED_PROMPT), config, tools)) > template_length + len(
                    _ESCAPED_PROMPT
                ):
                    template_length = math.inf
            # A target has an end token, and may begin with an extra token.
            if template_length + len(problem.prompt) + (len(target) + _BOUNDARY_TOKENS if targets else 0) < context:
                continue
        if targets and problem.is_conversation:
            length = sum(map(len, encode_sft(tokenizer, problem, config, tools, ends)[:2]))
            if length > context:
                raise _too_long_error(problem, f"the conversation has {length} tokens", context)
            continue
        prompt_length = len(encode_prompt(tokenizer, problem, config, tools))
        if prompt_length >= context:
            raise _too_long_error(problem, f"the prompt has {prompt_length} tokens, which leaves no room for a response", context)
        if targets and (length := prompt_length + len(encode_target(tokenizer, problem, ends))) > context:
            raise _too_long_error(problem, f"prompt and solution have {length} tokens", context)


def _too_long_error(problem: Problem, size: str, context: int) -> UserError:
    return UserError(f"{problem.prompt_id}: {size}; the context has {context} tokens; shorten or remove the row, or raise rollout.context")


def encode_conversation(
    tokenizer: Tokenizer, problem: Problem, system: Sequence[Message] = (), tools: Sequence[object] = (), ends: EndTokens | None = None
) -> SftSample:
    """Ids of `system` and `problem.messages`, and the loss mask of the assistant turns.

    A turn with `weight: 0` is not trained. `tools`: JSON schemas, in addition to those of the row. `ends`: the run's end tokens; default:
    the tokenizer's.

    Raises:
        UserError: if the template drops a part of the conversation, or renders a turn differently when other turns follow. Also if the
            conversation begins with the assistant, or has no trained token.
    """
    messages, tools = [*system, *problem.messages], [*(problem.tools or ()), *tools]
    ends = end_tokens(tokenizer) if ends is None else ends
    if messages[0]["role"] == "assistant":
        raise UserError(f"{problem.prompt_id}: the conversation begins with the assistant; begin it with a system or user message")
    try:
        if has_droppable_parts(messages, tools):
            tokenizer.check_rendered(messages, tools)
        text = tokenizer.chat_text(messages, tools, add_generation_prompt=False)
        turns = [
            _turn_span(tokenizer, messages, tools, index, text, problem.prompt_id)
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and message.get("weight") != 0
        ]
    except NotRendered as error:
        raise UserError(f"{problem.prompt_id}: {error}") from error
    ids, starts = tokenizer.encode_with_offsets(text)
    mask, is_closed = [0] * len(ids), True
    for begin, end in turns:
        inside = [index for index, start in enumerate(starts) if begin <= start < end]
        after = next((index for index, start in enumerate(starts) if start >= end), len(ids))
        positions, is_closed = _trained_positions(tokenizer, ids, inside, after, ends)
        for index in positions:
            mask[index] = 1
    if turns and turns[-1][1] == len(text) and not is_closed:
        calls_tool = bool(messages[-1].get("tool_calls"))
        ids, mask = [*ids, ends.token_to_append(templated=True, calls_tool=calls_tool)], [*mask, 1]
    if 1 not in mask:
        raise UserError(f"{problem.prompt_id}: no assistant turn is trained: all are empty or have a weight of 0; remove the row")
    first, last = mask.index(1), len(mask) - mask[::-1].index(1)
    return SftSample(ids[:first], ids[first:last], mask[first:last])


def _turn_span(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[object], index: int, text: str, prompt_id: str
) -> tuple[int, int]:
    """Begin and end of message `index` in the text of the whole conversation."""
    before = tokenizer.chat_text(messages[:index], tools, add_generation_prompt=True)
    through = tokenizer.chat_text(messages[: index + 1], tools, add_generation_prompt=False)
    if not through.startswith(before) or not text.startswith(through):
        starts_turn = through.startswith(before)
        reason = "changes turns when others follow" if starts_turn else "does not begin an assistant's turn with its generation prompt"
        expected, actual = (through, text) if starts_turn else (before, through)
        mismatch = next((i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), min(len(expected), len(actual)))
        raise UserError(
            f"{prompt_id}: the chat template of {tokenizer.name} {reason} (message {index + 1}, near "
            f"{actual[max(0, mismatch - 20) : mismatch + 20]!r}), so the assistant's tokens cannot be identified; "
            "cut the conversation to one assistant turn, or give the tokenizer another chat_template"
        )
    return len(before), len(through)


def _trained_positions(tokenizer: Tokenizer, ids: list[int], inside: list[int], after: int, ends: EndTokens) -> tuple[list[int], bool]:
    """The trained positions of a turn, and whether the last one ends the turn.

    inside: positions of the turn's text. after: the first position after it. White space after the end token is excluded. If the turn
    has no end token but the header of the next role begins with one, that token is included.
    """
    last_text = next((index for index in reversed(range(len(inside))) if not is_blank(tokenizer, ids[inside[index]])), -1)
    for index in range(max(last_text, 0), len(inside)):  # an end token may be white space itself (rollout.stop_ids)
        if ends.ends_turn(ids[inside[index]]):
            return inside[: index + 1], True
    header = after
    while header < len(ids) and is_blank(tokenizer, ids[header]):
        header += 1
    if header < len(ids) and ids[header] in ends.ids:
        return [*inside, *range(after, header + 1)], True
    return inside, False
