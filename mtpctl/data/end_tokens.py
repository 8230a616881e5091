"""The tokens that end a response: one set for a whole run, each token with its sources.

The set has the tokenizer's EOS token, `eos_token_id` of generation_config.json and config.json, the token that closes an assistant turn in
the chat template, and `rollout.stop_ids`. `rollout.end_ids` replaces all of these except `rollout.stop_ids`. Engines receive the set with
each request. Readers of responses and the supervised stage use the same set.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from mtpctl.data.tokenizers import HfTokenizer, Tokenizer, has_tokenizer, load_plain_tokenizer, make_byte_tokenizer
from mtpctl.errors import UserError
from mtpctl.recipe.model import ModelConfig, cached_file, hf_config
from mtpctl.recipe.rollout import RolloutBase

TOKENIZER, TEMPLATE, END_IDS, STOP_IDS = "tokenizer", "chat template", "rollout.end_ids", "rollout.stop_ids"
_ANSWER_MARKER = "TheAssistantsWords"


class EndToken(NamedTuple):
    """One end token, its text (empty without a tokenizer to decode it), and its sources."""

    id: int
    text: str
    sources: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.id}{f' {self.text!r}' if self.text else ''} ({', '.join(self.sources)})"


@dataclass(frozen=True)
class EndTokens:
    """The end tokens of a run. The first one ends plain text.

    Attributes:
        closing: the token with which the chat template closes an assistant turn. None if the template has none, for example because the
            header of the next role ends the turn.
        before_user: if `closing` is None, the end token that the template writes between an assistant turn and a user message.
        before_tool: if `closing` is None, the end token between an assistant turn and a tool message.
    """

    tokens: tuple[EndToken, ...]
    closing: int | None = None
    before_user: int | None = None
    before_tool: int | None = None

    @cached_property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)

    def ends_turn(self, token: int) -> bool:
        """Whether a token of a rendered assistant turn ends the turn."""
        return token == self.closing or token in self.ids

    def token_to_append(self, *, templated: bool, calls_tool: bool = False) -> int:
        """The end token that the supervised stage appends to a text without one.

        templated: the text is an assistant turn in the chat template. calls_tool: the turn calls a tool.
        """
        first = self.ids[0]
        if not templated:
            return first
        next_message_token = self.before_tool if calls_tool else self.before_user
        return next(
            token for token in (self.closing, next_message_token, self.before_user, first) if token is not None and token in self.ids
        )

    @property
    def disagreement(self) -> str:
        """A warning if the chat template closes turns with a token that no other source names; empty otherwise."""
        if self.closing is None:
            return ""
        token = next((token for token in self.tokens if token.id == self.closing), None)
        if token is None:
            return (
                f"rollout.end_ids does not contain {self.closing}, with which the chat template closes a turn: responses do not end at it"
            )
        if token.sources != (TEMPLATE,):
            return ""
        others = ", ".join(str(other) for other in self.tokens if other is not token)
        return (
            f"the chat template closes a turn with {token.id} {token.text!r}, which is not an end token of the model: responses end at it "
            f"and at {others}; rollout.end_ids replaces the set"
        )


def end_tokens(
    tokenizer: Tokenizer | None,
    rollout: RolloutBase | None = None,
    config_ids: Mapping[int, Sequence[str]] | None = None,
    *,
    vocab: int | None = None,
) -> EndTokens:
    """The end tokens from the tokenizer, the section `rollout`, and the model's configs (`config_end_ids`).

    Also configures a Hugging Face tokenizer to omit the end tokens from decoded text. Tokens that only `rollout.stop_ids` names are not
    omitted, because they may be part of the answer. Ids of the configs beyond the model's `vocab` are skipped, because the model cannot
    generate them. If `tokenizer` is None, as for a model that is not downloaded yet, the set is incomplete.
    """
    sources: dict[int, list[str]] = {}
    closing, before_user, before_tool = (None, None, None) if tokenizer is None else _find_turn_ends(tokenizer)
    if rollout is not None and rollout.end_ids is not None:
        sources = {token: [END_IDS] for token in rollout.end_ids}
    else:
        if tokenizer is not None:
            # For a tokenizer without an EOS token, `eos_id` is from the model's configs.
            has_eos = not isinstance(tokenizer, HfTokenizer) or tokenizer.inner.eos_token_id is not None
            sources[tokenizer.eos_id] = [TOKENIZER] if has_eos else []
        for token, names in (config_ids or {}).items():
            if vocab is None or token < vocab:
                sources.setdefault(token, []).extend(names)
        if closing is not None:
            sources.setdefault(closing, []).append(TEMPLATE)
    for token in rollout.stop_ids if rollout is not None else ():
        sources.setdefault(token, []).append(STOP_IDS)
    texts: dict[int, str] = {}
    if tokenizer is not None:
        texts = {token: tokenizer.decode([token], special=True) for token in sources if token < tokenizer.vocab_size}
        if isinstance(tokenizer, HfTokenizer):
            tokenizer.hide(token for token, names in sources.items() if names != [STOP_IDS])
    tokens = tuple(EndToken(token, texts.get(token, ""), tuple(names)) for token, names in sources.items())
    before_user, before_tool = (token if token in sources else None for token in (before_user, before_tool))
    return EndTokens(tokens, closing, before_user, before_tool)


def config_end_ids(model: ModelConfig, config: Mapping[str, object]) -> dict[int, list[str]]:
    """The end tokens in the model's `generation_config.json` and in `config` (its config.json), each with the names of its sources.

    Raises UserError for an `eos_token_id` that is not a token id or a list of them, and for a generation_config.json that is not JSON.
    """
    sources: dict[int, list[str]] = {}
    text_config = config.get("text_config")
    text_fields = text_config if isinstance(text_config, Mapping) else {}
    for source, fields in (
        ("generation_config.json", _read_generation_config(model)),
        ("config.json", config),
        ("text_config", text_fields),
    ):
        for token in _parse_eos_ids(fields.get("eos_token_id"), source):
            names = sources.setdefault(token, [])
            if source not in names:
                names.append(source)
    return sources


def recipe_end_tokens(model: ModelConfig, rollout: RolloutBase, *, vocab: int | None = None) -> tuple[EndTokens, str]:
    """The end tokens of a recipe from local files, and a note about a missing tokenizer (empty if there is none).

    Does not contact the hub and writes nothing. Raises UserError as `config_end_ids` and `load_tokenizer` do.
    """
    tokenizer, config = _load_local_tokenizer(model), hf_config(model, fetch=False)
    config_ids = config_end_ids(model, config or {})
    name = model.tokenizer or model.path or "model.config"
    note = ""
    if tokenizer is None:
        note = f"{name} has no tokenizer" if Path(name).is_dir() else f"the tokenizer of {name} is not downloaded yet"
    return end_tokens(tokenizer, rollout, config_ids, vocab=vocab), note


def _load_local_tokenizer(model: ModelConfig) -> Tokenizer | None:
    name = model.tokenizer or model.path
    if name == "bytes":
        with tempfile.TemporaryDirectory(prefix="mtpctl-bytes-") as folder:
            make_byte_tokenizer(Path(folder))
            return load_plain_tokenizer(Path(folder))
    if name is None:
        return None
    if Path(name).is_dir():
        return load_plain_tokenizer(Path(name)) if has_tokenizer(Path(name)) else None
    file = cached_file(name, "tokenizer.json") or cached_file(name, "tokenizer_config.json")
    return None if file is None else load_plain_tokenizer(file.parent)


def _read_generation_config(model: ModelConfig) -> Mapping[str, object]:
    file = None if model.path is None else cached_file(model.path, "generation_config.json")
    if file is None:
        return {}
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: {file} cannot be read as JSON ({error}); fix it, or remove it") from error
    if not isinstance(fields, dict):
        raise UserError(f"model.path: {file}:1: must be a JSON object")
    return fields


def _parse_eos_ids(value: object, source: str) -> list[int]:
    """The token ids of an `eos_token_id`. Negative values mean none."""
    ids: list[int] = []
    for token in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(token, bool) or not isinstance(token, int):
            raise UserError(f"model: eos_token_id of {source} must be a token id or a list of them, got {value!r:.60}; fix the file")
        if token >= 0:
            ids.append(token)
    return ids


def _find_turn_ends(tokenizer: Tokenizer) -> tuple[int | None, int | None, int | None]:
    """The values of `closing`, `before_user` and `before_tool` in `EndTokens`, from rendered conversations."""
    question, answer = {"role": "user", "content": "1"}, {"role": "assistant", "content": _ANSWER_MARKER}

    def first_token_after_answer(*next_messages: dict[str, str]) -> int | None:
        try:
            _, _, suffix = tokenizer.chat_text([question, answer, *next_messages], add_generation_prompt=False).partition(_ANSWER_MARKER)
        except UserError:  # no template, or one that rejects these roles
            return None
        ids = tokenizer.encode(suffix)
        token = next((token for token in ids if not is_blank(tokenizer, token)), None)
        return token if token is not None and token in tokenizer.special_ids | _added_token_ids(tokenizer) else None

    closing = first_token_after_answer()
    if closing is not None:
        return closing, None, None
    before_user, before_tool = (first_token_after_answer({"role": role, "content": "2"}) for role in ("user", "tool"))
    return None, before_user, before_tool


def _added_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of all added tokens. Some tokenizers do not mark the token that ends a turn as special."""
    return frozenset(tokenizer.inner.added_tokens_decoder) if isinstance(tokenizer, HfTokenizer) else frozenset()


def is_blank(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token is white space, for example between two turns of a template."""
    return token not in tokenizer.special_ids and not tokenizer.decode([token], special=True).strip()
