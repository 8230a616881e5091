"""Whole conversations for the supervised stage: their token ids, and which of them the assistant has said.

A conversation is rendered once by the tokenizer's chat template, and that text is tokenized once. The messages up to each turn of the
assistant are rendered too, with and without the turn. Both texts must be beginnings of the whole one, so that the turn is what lies
between them; the tokens whose text begins there are trained on, up to the token that ends the turn. What the template puts before a turn
(the header that opens it) and behind it (a line break) is not trained on, since a model does not say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mtpctl.data.problems import Message, Problem
from mtpctl.data.tokenizers import Tokenizer
from mtpctl.errors import UserError


class SftSample(NamedTuple):
    """One sample of the supervised stage: ids of the prompt, ids of the target, and the target's loss mask."""

    prompt: list[int]
    target: list[int]
    mask: list[int]


def encode_conversation(tokenizer: Tokenizer, problem: Problem, system: Sequence[Message] = ()) -> SftSample:
    """Ids of the conversation `problem.messages` behind the messages `system`, and the mask of the assistant's turns.

    A turn with `weight: 0` is not trained on. Where the template writes no end token behind the last turn, the tokenizer's follows it.
    Raises UserError, one line, for a template that writes a turn otherwise when others follow it, and for a conversation that begins with
    the assistant or of which nothing is trained on.
    """
    messages, tools = [*system, *problem.messages], problem.tools or ()
    if messages[0]["role"] == "assistant":
        raise UserError(f"{problem.prompt_id}: the conversation begins with the assistant; begin it with a system or user message")
    whole = tokenizer.chat_text(messages, tools, opened=False)
    turns = [
        _turn(tokenizer, messages, number, whole, problem)
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("weight") != 0
    ]
    ids, starts = tokenizer.encode_places(whole)
    mask = [0] * len(ids)
    for begin, end in turns:
        inside = [place for place, start in enumerate(starts) if begin <= start < end]
        for place in _said(tokenizer, ids, inside):
            mask[place] = 1
    if turns and turns[-1][1] == len(whole) and not _ended(tokenizer, ids, mask):
        ids, mask = [*ids, tokenizer.eos_id], [*mask, 1]
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


def _said(tokenizer: Tokenizer, ids: list[int], inside: list[int]) -> list[int]:
    """The places of a turn up to its end token, without the blanks that the template puts behind it."""
    end = next((i for i in reversed(range(len(inside))) if ids[inside[i]] in tokenizer.special_ids), None)
    if end is not None and not tokenizer.decode([ids[place] for place in inside[end + 1 :]]).strip():
        return inside[: end + 1]
    return inside


def _ended(tokenizer: Tokenizer, ids: list[int], mask: list[int]) -> bool:
    """Whether the last trained token is an end token."""
    last = len(mask) - 1 - mask[::-1].index(1) if 1 in mask else -1
    return last >= 0 and ids[last] in tokenizer.special_ids
