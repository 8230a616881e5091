"""Whole conversations for the supervised stage: their token ids, and which of them the assistant has said.

A conversation is rendered once by the tokenizer's chat template, and that text is tokenized once. The messages up to each turn of the
assistant are rendered too, with and without the turn. Both texts must be beginnings of the whole one, so that the turn is what lies
between them; the tokens whose text begins there are trained on, up to the token that ends the turn. What the template puts before a turn
(the header that opens it) and behind it (a line break) is not trained on, since a model does not say it.

The token that ends a turn is one of the run's end tokens. Some templates do not close a turn: the header of the next role ends it, and its
first token is trained with the turn. After the last turn of such a conversation an end token is appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mtpctl.data.end_tokens import EndTokens, end_tokens, is_blank
from mtpctl.data.problems import Message, Problem
from mtpctl.data.templates import NotRendered, has_droppable_parts
from mtpctl.data.tokenizers import Tokenizer
from mtpctl.errors import UserError


class SftSample(NamedTuple):
    """One sample of the supervised stage: ids of the prompt, ids of the target, and the target's loss mask."""

    prompt: list[int]
    target: list[int]
    mask: list[int]


def encode_conversation(tokenizer: Tokenizer, problem: Problem, system: Sequence[Message] = (), ends: EndTokens | None = None) -> SftSample:
    """Ids of the conversation `problem.messages` behind the messages `system`, and the mask of the assistant's turns.

    A turn with `weight: 0` is not trained on. `ends`: the run's end tokens; by default those of the tokenizer.
    Raises a one-line UserError if the template renders a turn differently when others follow, or leaves out a part of the conversation, and
    if the conversation begins with the assistant or has no trained token.
    """
    messages, tools = [*system, *problem.messages], problem.tools or ()
    ends = end_tokens(tokenizer) if ends is None else ends
    if messages[0]["role"] == "assistant":
        raise UserError(f"{problem.prompt_id}: the conversation begins with the assistant; begin it with a system or user message")
    try:
        if has_droppable_parts(messages, tools):
            tokenizer.check_shown(messages, tools)
        whole = tokenizer.chat_text(messages, tools, opened=False)
        turns = [
            _turn(tokenizer, messages, number, whole, problem)
            for number, message in enumerate(messages)
            if message["role"] == "assistant" and message.get("weight") != 0
        ]
    except NotRendered as error:
        raise UserError(f"{problem.prompt_id}: {error}") from error
    ids, starts = tokenizer.encode_places(whole)
    mask, ended = [0] * len(ids), True
    for begin, end in turns:
        inside = [place for place, start in enumerate(starts) if begin <= start < end]
        behind = next((place for place, start in enumerate(starts) if start >= end), len(ids))
        trained, ended = _said(tokenizer, ids, inside, behind, ends)
        for place in trained:
            mask[place] = 1
    if turns and turns[-1][1] == len(whole) and not ended:
        calls_tool = bool(messages[-1].get("tool_calls"))
        ids, mask = [*ids, ends.appended(templated=True, calls_tool=calls_tool)], [*mask, 1]
    if 1 not in mask:
        raise UserError(f"{problem.prompt_id}: no turn of the assistant is trained on: all are empty or have a weight of 0; remove the row")
    first, last = mask.index(1), len(mask) - mask[::-1].index(1)
    return SftSample(ids[:first], ids[first:last], mask[first:last])


def _turn(tokenizer: Tokenizer, messages: Sequence[Message], number: int, whole: str, problem: Problem) -> tuple[int, int]:
    """Where message `number` begins and ends in the text of the whole conversation."""
    tools = problem.tools or ()
    before = tokenizer.chat_text(messages[:number], tools, opened=True)
    through = tokenizer.chat_text(messages[: number + 1], tools, opened=False)
    if not through.startswith(before) or not whole.startswith(through):
        place = next((i for i, (a, b) in enumerate(zip(through, whole, strict=False)) if a != b), min(len(through), len(whole)))
        what = "opens a turn otherwise than it writes it" if not through.startswith(before) else "rewrites turns when others follow"
        near = whole[max(0, place - 20) : place + 20]
        raise UserError(
            f"{problem.prompt_id}: the chat template of {tokenizer.name} {what} (message {number + 1}, near {near!r}), "
            "so it cannot be told what the assistant said; cut the conversation to one turn of the assistant, or give the tokenizer "
            "another chat_template"
        )
    return len(before), len(through)


def _said(tokenizer: Tokenizer, ids: list[int], inside: list[int], behind: int, ends: EndTokens) -> tuple[list[int], bool]:
    """The positions of a turn that are trained on, and whether the last one ends the turn.

    `inside`: the positions of the turn's text; `behind`: the first position after it. Blanks that a template writes after the end token
    are left out. If the turn has no end token, the header of the next role may begin with one.
    """
    last = next((number for number in reversed(range(len(inside))) if not is_blank(tokenizer, ids[inside[number]])), -1)
    for number in range(max(last, 0), len(inside)):  # an end token may be white space itself (rollout.stop_ids)
        if ends.ends_turn(ids[inside[number]]):
            return inside[: number + 1], True
    place = behind
    while place < len(ids) and is_blank(tokenizer, ids[place]):
        place += 1
    if place < len(ids) and ids[place] in ends.ids:
        return [*inside, *range(behind, place + 1)], True
    return inside, False
