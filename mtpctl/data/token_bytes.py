"""The bytes of single tokens, and where tokens begin in a text.

A token may be a part of a character. Decoded alone it gives U+FFFD, which has other bytes, so the bytes are read from the vocabulary:
byte-level BPE writes each byte as a printable character, and tokenizers with byte fallback have tokens such as `<0xE2>`.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""The character for a space in SentencePiece vocabularies."""


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE: itself, or the next free one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def reader_of(inner: PreTrainedTokenizerBase) -> Callable[[int], bytes]:
    """A function that returns the bytes of a token; none for an id without a token.

    Tokenizers of another kind than byte-level BPE and SentencePiece give the bytes of the token's text.
    """
    added = {number: token.content for number, token in inner.added_tokens_decoder.items()}
    kinds = _kinds(inner)
    values = {character: byte for byte, character in enumerate(byte_characters())}

    def read(token_id: int) -> bytes:
        if token_id in added:
            return added[token_id].encode()
        name = cast("str | None", inner.convert_ids_to_tokens(token_id)) if 0 <= token_id < len(inner) else None
        if name is None:
            return b""
        if "ByteLevel" in kinds and all(character in values for character in name):
            return bytes(values[character] for character in name)
        if "ByteFallback" in kinds and (match := _FALLBACK.fullmatch(name)) is not None:
            return bytes([int(match[1], 16)])
        if kinds & {"ByteFallback", "Metaspace"}:
            return name.replace(_SPACE, " ").encode()
        return str(inner.decode([token_id])).encode()

    return read


def text_offsets(pieces: Sequence[bytes], text: str) -> list[int]:
    """The offset of each token in `text`, in characters; a token that continues a character has the offset of that character.

    `pieces`: the bytes of the tokens; empty for tokens that are not in the text, such as special tokens.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    starts, read = [], 0
    for piece in pieces:
        starts.append(read)
        read += len(decoder.decode(piece))
    read += len(decoder.decode(b"", final=True))
    # SentencePiece adds a space before a text and removes it when decoding.
    dropped = read - len(text) if b"".join(pieces).startswith(b" ") and not text.startswith(" ") else 0
    return [min(max(start - dropped, 0), len(text)) for start in starts]


def _kinds(inner: PreTrainedTokenizerBase) -> set[str]:
    """The kinds of decoders that a tokenizer uses."""
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None:
        return {"ByteFallback"} if hasattr(inner, "sp_model") else set()
    settings: dict[str, Any] = json.loads(backend.to_str())
    decoder = settings.get("decoder") or {}
    kinds = {str(each["type"]) for each in decoder.get("decoders", [decoder]) if each}
    return kinds | ({"ByteFallback"} if settings["model"].get("byte_fallback") else set())
