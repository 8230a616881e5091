"""Token ids of a problem: its prompt, and its target for the supervised stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mtpctl.data.problems import Problem
from mtpctl.data.tokenizers import Tokenizer
from mtpctl.errors import UserError
from mtpctl.recipe.data import DataConfig


def encode_prompt(tokenizer: Tokenizer, problem: Problem, config: DataConfig, tools: Sequence[object] = ()) -> list[int]:
    """Ids of the prompt: as plain text, or with `data.chat_template` as a conversation that begins with the system prompt.

    `tools`: JSON schemas of what the environment lets the model call, for the template.
    """
    if not config.chat_template:
        return tokenizer.encode(problem.prompt, special=True)
    system = [] if config.system_prompt is None else [{"role": "system", "content": config.system_prompt}]
    return tokenizer.chat([*system, {"role": "user", "content": problem.prompt}], tools)


def encode_target(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    """Ids of the text that the supervised stage trains on, with the end token."""
    return [*tokenizer.encode(problem.target), tokenizer.eos_id]


def fit_problems(
    tokenizer: Tokenizer,
    problems: Iterable[Problem],
    config: DataConfig,
    *,
    context: int,
    targets: bool = False,
    tools: Sequence[object] = (),
) -> None:
    """Raise UserError for the first prompt that leaves no room for a response in `context` tokens.

    With `targets`, for the first prompt and solution that do not fit together.
    """
    for problem in problems:
        prompt = len(encode_prompt(tokenizer, problem, config, tools))
        if prompt >= context:
            raise UserError(
                f"{problem.prompt_id}: the prompt has {prompt} tokens and the context holds {context}; "
                "shorten or remove it, or raise rollout.context"
            )
        if targets and prompt + len(encode_target(tokenizer, problem)) > context:
            raise UserError(
                f"{problem.prompt_id}: prompt and solution have {prompt + len(encode_target(tokenizer, problem))} tokens and the "
                f"context holds {context}; shorten or remove them, or raise rollout.context"
            )
