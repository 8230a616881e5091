"""Token ids of a problem: its prompt, and what the supervised stage trains on."""

from __future__ import annotations

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


def encode_prompt(tokenizer: Tokenizer, problem: Problem, config: DataConfig, tools: Sequence[object] = ()) -> list[int]:
    """Ids of the prompt: plain text as it is, chat messages and with `data.chat_template` all prompts in the chat template.

    The system prompt of the recipe precedes a conversation that has none. `tools`: JSON schemas of what the environment lets the model
    call, for the template, in addition to those of the row. Raises UserError that names the row if the template rejects or drops a part.
    """
    if not problem.messages and not config.chat_template:
        return tokenizer.encode(problem.prompt, special=True)
    messages = problem.messages or [{"role": "user", "content": problem.prompt}]
    try:
        return tokenizer.chat([*_system(problem, config), *messages], [*(problem.tools or ()), *tools])
    except NotRendered as error:
        raise UserError(f"{problem.prompt_id}: {error}") from error


def chatted(config: DataConfig, problems: Iterable[Problem]) -> bool:
    """Whether prompts go through the chat template, because the recipe says so or because one of them is a conversation."""
    return config.chat_template or any(problem.messages for problem in problems)


def hinted(problem: Problem, hint: str) -> Problem:
    """The problem with the text `hint` in place of its prompt, or of its last message of the user: what `train.rl.teacher.hint` means.

    In it stand the prompt, the answer, the solution and the row's other columns, in braces. Raises UserError for one that the row lacks.
    """
    messages = [dict(message) for message in problem.messages]
    asked = next((message for message in reversed(messages) if message.get("role") == "user"), None)
    prompt = str(asked.get("content", "")) if asked is not None else problem.prompt
    fields = {**problem.fields, "prompt": prompt, "answer": problem.answer, "solution": problem.target}
    try:
        filled = string.Formatter().vformat(hint, (), fields)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        there = ", ".join(sorted(fields))
        raise UserError(
            f"train.rl.teacher.hint: {hint!r} cannot be filled in for {problem.prompt_id} ({error}); there are {there}"
        ) from error
    if asked is not None:
        asked["content"] = filled
    return replace(problem, prompt=filled, messages=tuple(messages))


def encode_target(tokenizer: Tokenizer, problem: Problem, ends: EndTokens | None = None, *, templated: bool = False) -> list[int]:
    """Ids of the text that the supervised stage trains on, with an end token appended unless the text ends with one.

    `ends`: the run's end tokens, by default the tokenizer's. `templated`: the prompt is in the chat template.
    """
    ids = tokenizer.encode(problem.target)
    if ends is None:
        return [*ids, tokenizer.eos_id]
    return ids if ids and ids[-1] in ends.ids and ids[-1] in tokenizer.special_ids else [*ids, ends.appended(templated=templated)]


def encode_sft(
    tokenizer: Tokenizer, problem: Problem, config: DataConfig, tools: Sequence[object] = (), ends: EndTokens | None = None
) -> SftSample:
    """The sample that the supervised stage trains on: a conversation with its assistant's turns as targets, or prompt and target."""
    if problem.is_conversation:
        return encode_conversation(tokenizer, problem, _system(problem, config), ends)
    target = encode_target(tokenizer, problem, ends, templated=bool(problem.messages) or config.chat_template)
    return SftSample(encode_prompt(tokenizer, problem, config, tools), target, [1] * len(target))


def _system(problem: Problem, config: DataConfig) -> list[Message]:
    """The recipe's system message, where the conversation does not begin with one of its own."""
    if config.system_prompt is None or (problem.messages and problem.messages[0]["role"] in ("system", "developer")):
        return []
    return [{"role": "system", "content": config.system_prompt}]


def fit_problems(
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

    With `targets`, for the first prompt and solution, or conversation, that do not fit together.
    """
    for problem in problems:
        if targets and problem.is_conversation:
            length = sum(map(len, encode_sft(tokenizer, problem, config, tools, ends)[:2]))
            if length > context:
                raise UserError(
                    f"{problem.prompt_id}: the conversation has {length} tokens and the context holds {context}; "
                    "shorten or remove it, or raise rollout.context"
                )
            continue
        prompt = len(encode_prompt(tokenizer, problem, config, tools))
        if prompt >= context:
            raise UserError(
                f"{problem.prompt_id}: the prompt has {prompt} tokens and the context holds {context}; "
                "shorten or remove it, or raise rollout.context"
            )
        if targets and (whole := prompt + len(encode_target(tokenizer, problem, ends))) > context:
            raise UserError(
                f"{problem.prompt_id}: prompt and solution have {whole} tokens and the context holds {context}; "
                "shorten or remove them, or raise rollout.context"
            )


# Whole conversations for the supervised stage: their token ids, and which of them the assistant has said.
#
# A conversation is rendered once by the tokenizer's chat template, and that text is tokenized once. The messages up to each turn of the
# assistant are rendered too, with and without the turn. Both texts must be beginnings of the whole one, so that the turn is what lies
# between them; the tokens whose text begins there are trained on, up to the token that ends the turn. What the template puts before a turn
# (the header that opens it) and behind it (a line break) is not trained on, since a model does not say it.
#
# The token that ends a turn is one of the run's end tokens. Some templates do not close a turn: the header of the next role ends it, and
# its first token is trained with the turn. After the last turn of such a conversation an end token is appended.


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
