"""The tokens that end a response: one set for a whole run, each token with its sources.

The set has the tokens that the model names (the tokenizer's EOS token, and `eos_token_id` of generation_config.json and config.json), the
token that closes an assistant turn in the chat template, and `rollout.stop_ids`. `rollout.end_ids` replaces all of these except
`rollout.stop_ids`. Engines receive the set with each request. Readers of responses and the supervised stage use the same set.
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
_MARK = "TheAssistantsWords"


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
        closing: the token with which the chat template closes an assistant turn. None if it has none, for example because the header of the
            next role ends the turn.
        before_user: the end token that the template writes between an assistant turn and a user message, if `closing` is None.
        before_tool: the same before a tool message.
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

    def appended(self, *, templated: bool, calls_tool: bool = False) -> int:
        """The end token that the supervised stage appends to a text without one."""
        first = self.ids[0]
        if not templated:
            return first
        following = self.before_tool if calls_tool else self.before_user
        return next(token for token in (self.closing, following, self.before_user, first) if token is not None and token in self.ids)

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
        others = ", ".join(str(each) for each in self.tokens if each is not token)
        return (
            f"the chat template closes a turn with {token.id} {token.text!r}, which is not an end token of the model: responses end at it "
            f"and at {others}; rollout.end_ids replaces the set"
        )


def end_tokens(
    tokenizer: Tokenizer | None,
    rollout: RolloutBase | None = None,
    named: Mapping[int, Sequence[str]] | None = None,
    *,
    vocab: int | None = None,
) -> EndTokens:
    """The end tokens from the tokenizer, the section `rollout`, and the model's configs (`config_end_ids`).

    Ids of the configs beyond the model's `vocab` are skipped, because the model cannot generate them. If `tokenizer` is None, as for a
    model that is not downloaded yet, the set is incomplete.
    """
    sources: dict[int, list[str]] = {}
    closing, user, tool = (None, None, None) if tokenizer is None else _turn_ends(tokenizer)
    if rollout is not None and rollout.end_ids is not None:
        sources = {token: [END_IDS] for token in rollout.end_ids}
    else:
        if tokenizer is not None:
            # For a tokenizer without an EOS token, `eos_id` is from the model's configs.
            has_eos = not isinstance(tokenizer, HfTokenizer) or tokenizer.inner.eos_token_id is not None
            sources[tokenizer.eos_id] = [TOKENIZER] if has_eos else []
        for token, names in (named or {}).items():
            if vocab is None or token < vocab:
                sources.setdefault(token, []).extend(names)
        if closing is not None:
            sources.setdefault(closing, []).append(TEMPLATE)
    for token in rollout.stop_ids if rollout is not None else ():
        sources.setdefault(token, []).append(STOP_IDS)
    if tokenizer is not None:
        texts = {token: tokenizer.decode([token], special=True) for token in sources if token < tokenizer.vocab_size}
        if isinstance(tokenizer, HfTokenizer):
            # A stop id that only the recipe names may be part of the answer, which a reward reads.
            tokenizer.hide(token for token, names in sources.items() if names != [STOP_IDS])
    else:
        texts = {}
    tokens = tuple(EndToken(token, texts.get(token, ""), tuple(names)) for token, names in sources.items())
    user, tool = (token if token in sources else None for token in (user, tool))
    return EndTokens(tokens, closing, user, tool)


def config_end_ids(model: ModelConfig, config: Mapping[str, object]) -> dict[int, list[str]]:
    """The end tokens that the model's `generation_config.json` and `config` (its config.json) name, each with the names of the sources.

    Raises UserError for an `eos_token_id` that is not a token id or a list of them, and for a generation_config.json that is not JSON.
    """
    sources: dict[int, list[str]] = {}
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    for source, fields in (("generation_config.json", _generation_config(model)), ("config.json", config), ("text_config", inner)):
        for token in _ids(fields.get("eos_token_id"), source):
            names = sources.setdefault(token, [])
            if source not in names:
                names.append(source)
    return sources


def recipe_end_tokens(model: ModelConfig, rollout: RolloutBase, *, vocab: int | None = None) -> tuple[EndTokens, str]:
    """The end tokens of a recipe from local files, and a note about a missing tokenizer (empty if there is none).

    Does not contact the hub and writes nothing. Raises UserError as `config_end_ids` and `load_tokenizer` do.
    """
    tokenizer, config = _local_tokenizer(model), hf_config(model, fetch=False)
    named = config_end_ids(model, config or {})
    name = model.tokenizer or model.path or "model.config"
    missing = (
        ""
        if tokenizer is not None
        else f"{name} has no tokenizer"
        if Path(name).is_dir()
        else f"the tokenizer of {name} is not downloaded yet"
    )
    return end_tokens(tokenizer, rollout, named, vocab=vocab), missing


def _local_tokenizer(model: ModelConfig) -> Tokenizer | None:
    named = model.tokenizer or model.path
    if named == "bytes":
        with tempfile.TemporaryDirectory(prefix="mtpctl-bytes-") as folder:
            make_byte_tokenizer(Path(folder))
            return load_plain_tokenizer(Path(folder))
    if named is None:
        return None
    if Path(named).is_dir():
        return load_plain_tokenizer(Path(named)) if has_tokenizer(Path(named)) else None
    file = cached_file(named, "tokenizer.json") or cached_file(named, "tokenizer_config.json")
    return None if file is None else load_plain_tokenizer(file.parent)


def _generation_config(model: ModelConfig) -> Mapping[str, object]:
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


def _ids(value: object, source: str) -> list[int]:
    """The token ids of an `eos_token_id`. Negative values mean none."""
    ids: list[int] = []
    for each in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(each, bool) or not isinstance(each, int):
            raise UserError(f"model: eos_token_id of {source} must be a token id or a list of them, got {value!r:.60}; fix the file")
        if each >= 0:
            ids.append(each)
    return ids


def _turn_ends(tokenizer: Tokenizer) -> tuple[int | None, int | None, int | None]:
    """The token that closes an assistant turn in the chat template, and the tokens that follow a turn if none closes it.

    The latter are the first tokens of a user message and of a tool message. None if there is no such token.
    """
    question, answer = {"role": "user", "content": "1"}, {"role": "assistant", "content": _MARK}

    def next_token(*following: dict[str, str]) -> int | None:
        try:
            _, _, suffix = tokenizer.chat_text([question, answer, *following], opened=False).partition(_MARK)
        except UserError:  # no template, or one that rejects these roles
            return None
        ids = tokenizer.encode(suffix)
        token = next((token for token in ids if not is_blank(tokenizer, token)), None)
        return token if token is not None and token in tokenizer.special_ids | _added(tokenizer) else None

    closing = next_token()
    if closing is not None:
        return closing, None, None
    return None, next_token({"role": "user", "content": "2"}), next_token({"role": "tool", "content": "2"})


def _added(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of all added tokens, because some tokenizers do not mark the end of a turn as special."""
    return frozenset(tokenizer.inner.added_tokens_decoder) if isinstance(tokenizer, HfTokenizer) else frozenset()


def is_blank(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token is white space, such as a template writes between turns."""
    return token not in tokenizer.special_ids and not tokenizer.decode([token], special=True).strip()
