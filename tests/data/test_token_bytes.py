"""The bytes of tokens, under tokenizers of several kinds, and where tokens begin in a text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast

from mtpctl.data.tokenizers import HfTokenizer, load_byte_tokenizer, make_byte_tokenizer, text_offsets

TEXT = "naïve café ☃ 🂡 the the\n\tx"


def byte_level() -> HfTokenizer:
    core = Core(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False)
    core.train_from_iterator(["the café the naïve the"] * 50, trainer)
    return HfTokenizer(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>"), "byte-level")


def byte_fallback() -> HfTokenizer:
    """As Llama 2's: SentencePiece with a space before the text, and a token for each byte that no other one has."""
    names = ["<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"naïvecfthx", "▁t", "▁th", "▁the"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    core = Core(models.BPE({name: number for number, name in enumerate(dict.fromkeys(names))}, merges, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(parts)
    core.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    return HfTokenizer(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>"), "byte-fallback")


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    ids = tokenizer.encode(TEXT)
    pieces = tokenizer.token_bytes(ids)
    assert b"".join(pieces).decode().removeprefix(" ") == TEXT == tokenizer.decode(ids)
    assert len(ids) < len(TEXT.encode()), "some tokens are several characters"
    assert any(len(piece) == 1 and piece[0] >= 0x80 for piece in pieces), "and some are a part of one"
    offsets = text_offsets(pieces, TEXT)
    for offset, piece in zip(offsets, pieces, strict=True):
        if piece[0] & 0xC0 == 0x80:  # goes on within a character
            assert piece[:1] in TEXT[offset].encode()[1:]
        else:
            assert TEXT[offset:].encode().startswith(piece) or (offset == 0 and piece.startswith(b" "))


def test_special_added_and_unknown_ids(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path)
    tokenizer = load_byte_tokenizer(tmp_path)
    assert tokenizer.token_bytes([258, 65, 0xC3, 100_000, -1]) == [b"<eos>", b"A", b"\xc3", b"", b""]


def test_offsets_of_partial_characters_are_within_the_text() -> None:
    pieces = [b"\xe2\x98", b"", b"a", b"\xc3", b"\xa9", b"\xff"]
    text = b"".join(pieces).decode(errors="replace")
    assert text == "\ufffda\xe9\ufffd" and text_offsets(pieces, text) == [0, 0, 0, 2, 2, 3]
