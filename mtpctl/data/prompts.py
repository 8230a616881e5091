"""Token ids of a problem: its prompt, and what the supervised stage trains on."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mtpctl.data.conversations import SftSample, encode_conversation
from mtpctl.data.end_tokens import EndTokens
from mtpctl.data.problems import Message, Problem
from mtpctl.data.templates import NotRendered
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
