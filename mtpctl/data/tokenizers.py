"""Tokenizers: their interface, a byte-level tokenizer that needs no download, and the bytes of single tokens.

The byte tokenizer is an ordinary Hugging Face folder, which transformers and the engines load. The id of a byte is its value (0 to 255);
`<pad>` is 256, `<bos>` 257, `<eos>` 258. It adds no special tokens.

A token may contain only some bytes of a character. Decoding it alone gives U+FFFD, so the bytes are read from the vocabulary instead:
byte-level BPE writes each byte as a printable character, and tokenizers with byte fallback have tokens such as `<0xE2>`.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from mtpctl.compat.transformers import import_transformers
from mtpctl.data.messages import NotRendered, RenderCheck, prepare_for_template, without_nulls
from mtpctl.data.problems import Message
from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.recipe.model import cached_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TemplateVariables = Mapping[str, object]
NO_TEMPLATE_VARIABLES: TemplateVariables = {}
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
_BYTE_TEMPLATE = """\
{%- for tool in tools or [] %}{% set function = tool.function or tool %}
{{- 'functions: ' if loop.first else ', ' }}{{ function.name }}({{ ((function.parameters or {}).properties or {}) | join(', ') }})
{{- '\n' if loop.last }}{% endfor %}
{%- for m in messages %}
{{- m.role + ': ' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{ 'CALL ' + call.function.name + ' ' + (call.function.arguments | tojson) }}{% endfor %}
{{- '<eos>' if m.role == 'assistant' else '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
"""Chat template of the byte tokenizer: one line for the tools, one per message, and the end token after assistant turns.

Tools are rendered as `name(parameter, ...)`: their schemas would take hundreds of tokens, one per byte.
"""


class Tokenizer(Protocol):
    """Encodes text and decodes ids. `name` is the folder or hub id; `vocab_size` is one more than the largest id."""

    name: str

    @property
    def eos_id(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def special_ids(self) -> AbstractSet[int]:
        """Ids of tokens that are not text, such as those that end a turn."""
        ...

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of the text; with `special`, preceded by the special tokens that the tokenizer adds before a prompt (bos in some)."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of the ids, without unknown ids, and without special tokens unless `special` is true."""
        ...

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token, even if it is a part of a character; empty for unknown ids."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of the text, and the offset of each in characters. Raises UserError for a tokenizer without offsets."""
        ...

    def chat(
        self, messages: Sequence[Message], tools: Sequence[object] = (), variables: TemplateVariables = NO_TEMPLATE_VARIABLES
    ) -> list[int]:
        """Ids of a conversation in the chat template, with the generation prompt.

        tools: JSON schemas of the model's tools. variables: further variables of the template.
        """
        ...

    def chat_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[object] = (),
        variables: TemplateVariables = NO_TEMPLATE_VARIABLES,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """A conversation in the chat template as text; with `add_generation_prompt`, up to where the model's turn begins."""
        ...

    def check_rendered(
        self, messages: Sequence[Message], tools: Sequence[object] = (), variables: TemplateVariables = NO_TEMPLATE_VARIABLES
    ) -> None:
        """Raise NotRendered if the chat template drops tools, tool calls or messages of a role. `chat` does this check itself."""
        ...


class HfTokenizer:
    """A transformers tokenizer behind the `Tokenizer` protocol."""

    def __init__(self, inner: PreTrainedTokenizerBase, name: str, *, ignore_tools: bool = False) -> None:
        eos_id = _read_configured_eos(name) if inner.eos_token_id is None else inner.eos_token_id
        if eos_id is None:
            raise UserError(f"model.tokenizer: {name} has no eos_token; add one to its tokenizer_config.json")
        self.inner = inner
        self.name = name
        self.chat_template: str = inner.chat_template if isinstance(inner.chat_template, str) else ""
        self.eos_id: int = eos_id
        self.vocab_size: int = max(inner.get_vocab().values()) + 1
        # In many tokenizers the end of a turn is only an added token that is marked as special.
        added_special_ids = [token_id for token_id, token in inner.added_tokens_decoder.items() if token.special]
        self.special_ids: frozenset[int] = frozenset([self.eos_id, *inner.all_special_ids, *added_special_ids])
        self._hidden: list[int] = []
        self._render_check = RenderCheck(name, ignore_tools=ignore_tools)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        ids: list[int] = self.inner.encode(text, add_special_tokens=False)
        if not special:
            return ids
        ids_with_special: list[int] = self.inner.encode(text, add_special_tokens=True)
        for length in range(len(ids_with_special) - len(ids) + 1) if ids else ():
            if ids_with_special[length : length + len(ids)] == ids:
                # The prefix (bos) is not added twice. The suffix of some tokenizers (eos) is dropped, because a model stops there.
                prefix = ids_with_special[:length]
                return ids if ids[:length] == prefix else [*prefix, *ids]
        return ids_with_special[:-1] if ids_with_special[-1:] == [self.eos_id] != ids[-1:] else ids_with_special

    def hide(self, ids: Iterable[int]) -> None:
        """Remove these end tokens from decoded text, even if the tokenizer does not mark them as special."""
        self._hidden = sorted({*ids} - self.special_ids)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        import numpy as np

        # transformers checks every number of a list, which takes longer than decoding; it does not check an array.
        token_ids = np.asarray(ids, np.int64)
        if self._hidden and not special:
            token_ids = token_ids[~np.isin(token_ids, self._hidden)]
        text = self.inner.decode(token_ids[token_ids < self.vocab_size], skip_special_tokens=not special)
        assert isinstance(text, str)
        return text

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        return [self._read_bytes(token_id) for token_id in ids]

    @cached_property
    def _read_bytes(self) -> Callable[[int], bytes]:
        return make_byte_reader(self.inner)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        if not self.inner.is_fast:
            raise UserError(f"model.tokenizer: {self.name} has no token offsets, which conversations need; name another")
        encoding = self.inner(text, add_special_tokens=False, return_offsets_mapping=True)
        return cast("list[int]", encoding["input_ids"]), [begin for begin, _ in cast("list[tuple[int, int]]", encoding["offset_mapping"])]

    def chat(
        self, messages: Sequence[Message], tools: Sequence[object] = (), variables: TemplateVariables = NO_TEMPLATE_VARIABLES
    ) -> list[int]:
        self.check_rendered(messages, tools, variables)
        return cast("list[int]", self._apply_template(messages, tools, variables, add_generation_prompt=True, tokenize=True))

    def chat_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[object] = (),
        variables: TemplateVariables = NO_TEMPLATE_VARIABLES,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        return cast(str, self._apply_template(messages, tools, variables, add_generation_prompt=add_generation_prompt, tokenize=False))

    def check_rendered(
        self, messages: Sequence[Message], tools: Sequence[object] = (), variables: TemplateVariables = NO_TEMPLATE_VARIABLES
    ) -> None:
        def render(messages: Sequence[Message], tools: Sequence[object]) -> str:
            return self.chat_text(messages, tools, variables, add_generation_prompt=messages[-1]["role"] != "assistant")

        self._render_check.check(render, messages, tools)

    def _apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[object],
        variables: TemplateVariables,
        *,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> object:
        from jinja2 import TemplateError

        if self.inner.chat_template is None:
            raise UserError(
                f"data.chat_template: the tokenizer {self.name} has no chat template; set it to false and give prompts as plain text, "
                "or name a tokenizer that has one in model.tokenizer"
            )
        prepared, schemas = cast(Any, prepare_for_template(messages)), cast(Any, without_nulls(list(tools)) or None)
        try:
            return self.inner.apply_chat_template(
                prepared,
                tools=schemas,
                add_generation_prompt=add_generation_prompt,
                tokenize=tokenize,
                return_dict=False,
                **cast(Any, variables),
            )
        except (TemplateError, TypeError, KeyError) as error:
            roles = list(dict.fromkeys(str(message["role"]) for message in messages))
            fix = "leave data.system_prompt out, or set chat_template: false" if "system" in roles else "change the messages"
            raise NotRendered(
                f"data.chat_template: the template of {self.name} rejects a conversation of {' and '.join(roles)} ({_first_line(error)}); "
                f"{fix}, or give the tokenizer another chat_template"
            ) from error


def load_tokenizer(path: str | Path, *, ignore_tools: bool = False) -> Tokenizer:
    """The tokenizer of a folder or hub id. `ignore_tools`: its chat template may drop tools (`data.ignore_tools`).

    Raises UserError for a folder without a tokenizer, PrerequisiteMissing if the hub does not respond.
    """
    import_transformers()
    from transformers import AutoTokenizer

    local = Path(path).is_dir()
    try:
        inner = AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception for unknown formats
        if local:
            raise UserError(
                f"model.tokenizer: the tokenizer in {path} cannot be loaded ({_first_line(error)}); name another folder"
            ) from error
        raise PrerequisiteMissing(
            f"model.tokenizer: there is no folder {path}, and the hub download failed ({_first_line(error)})"
        ) from error
    return HfTokenizer(inner, str(path), ignore_tools=ignore_tools)


def load_plain_tokenizer(folder: Path, *, ignore_tools: bool = False) -> Tokenizer:
    """Load the tokenizer of a folder. A `tokenizer.json` is loaded without AutoTokenizer, which takes ten times as long."""
    if not has_tokenizer(folder):
        raise UserError(f"model.tokenizer: {folder} has no tokenizer (tokenizer.json); name a folder or hub id that has one")
    if not (folder / "tokenizer.json").is_file():
        return load_tokenizer(folder, ignore_tools=ignore_tools)
    import_transformers()
    from transformers import PreTrainedTokenizerFast

    try:
        inner = PreTrainedTokenizerFast.from_pretrained(str(folder))
    except Exception as error:  # as in `load_tokenizer`
        raise UserError(
            f"model.tokenizer: the tokenizer in {folder} cannot be loaded ({_first_line(error)}); name another folder"
        ) from error
    return HfTokenizer(inner, str(folder), ignore_tools=ignore_tools)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def check_fits_model(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise UserError if the tokenizer has ids beyond a model's `vocab_size`."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"model.tokenizer: its ids go up to {tokenizer.vocab_size - 1}, but the model's vocabulary has {vocab_size}; "
            "use the model's own tokenizer, or a larger vocab_size"
        )


def make_byte_tokenizer(dest: Path, *, chat: bool = True) -> None:
    """Write a byte-level tokenizer as a Hugging Face folder (tokenizer.json and two configs); with `chat`, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    characters = byte_characters()
    inner = Tokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(characters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, BOS, EOS)])
    specials = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
        **({"chat_template": _BYTE_TEMPLATE} if chat else {}),
        **specials,
    }
    dest.mkdir(parents=True, exist_ok=True)
    inner.save(str(dest / "tokenizer.json"))
    (dest / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (dest / "special_tokens_map.json").write_text(json.dumps(specials, indent=2) + "\n")


def _read_configured_eos(path: str) -> int | None:
    """The first end token in the model's configs next to the tokenizer; None if there is none."""
    for name in ("generation_config.json", "config.json"):
        file = cached_file(path, name)
        try:
            fields = json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
        except (OSError, ValueError):  # reported where the model is read
            continue
        ids = fields.get("eos_token_id") if isinstance(fields, dict) else None
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int) and not isinstance(first, bool) and first >= 0:
            return first
    return None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


_BYTE_FALLBACK_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"
"""The character for a space in SentencePiece vocabularies."""


def byte_characters() -> list[str]:
    """The printable character of each byte in byte-level BPE: the byte's own character if printable, else the next one from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def make_byte_reader(inner: PreTrainedTokenizerBase) -> Callable[[int], bytes]:
    """Return a function from token id to the token's bytes, which are empty for an unknown id.

    Tokenizers other than byte-level BPE and SentencePiece are decoded token by token.
    """
    added = {token_id: token.content for token_id, token in inner.added_tokens_decoder.items()}
    decoder_types = _decoder_types(inner)
    byte_of_character = {character: byte for byte, character in enumerate(byte_characters())}

    def read(token_id: int) -> bytes:
        if token_id in added:
            return added[token_id].encode()
        token = cast("str | None", inner.convert_ids_to_tokens(token_id)) if 0 <= token_id < len(inner) else None
        if token is None:
            return b""
        if "ByteLevel" in decoder_types and all(character in byte_of_character for character in token):
            return bytes(byte_of_character[character] for character in token)
        if "ByteFallback" in decoder_types and (match := _BYTE_FALLBACK_TOKEN.fullmatch(token)) is not None:
            return bytes([int(match[1], 16)])
        if decoder_types & {"ByteFallback", "Metaspace"}:
            return token.replace(_SENTENCEPIECE_SPACE, " ").encode()
        return str(inner.decode([token_id])).encode()

    return read


def text_offsets(pieces: Sequence[bytes], text: str) -> list[int]:
    """The offset of each token in `text`, in characters. A token that continues a character has that character's offset.

    `pieces`: the bytes of the tokens; empty for tokens that are not in the text, such as special tokens.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    starts, length = [], 0
    for piece in pieces:
        starts.append(length)
        length += len(decoder.decode(piece))
    length += len(decoder.decode(b"", final=True))
    # SentencePiece adds a space before a text and removes it when decoding.
    removed_spaces = length - len(text) if b"".join(pieces).startswith(b" ") and not text.startswith(" ") else 0
    return [min(max(start - removed_spaces, 0), len(text)) for start in starts]


def _decoder_types(inner: PreTrainedTokenizerBase) -> set[str]:
    """The decoders of a tokenizer."""
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None:
        return {"ByteFallback"} if hasattr(inner, "sp_model") else set()
    serialized: dict[str, Any] = json.loads(backend.to_str())
    decoder = serialized.get("decoder") or {}
    types = {str(part["type"]) for part in decoder.get("decoders", [decoder]) if part}
    return types | ({"ByteFallback"} if serialized["model"].get("byte_fallback") else set())
