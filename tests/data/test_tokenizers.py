"""The byte tokenizer, and the bytes and offsets of tokens under several kinds of tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast

from mtpctl.data.tokenizers import (
    HfTokenizer,
    Tokenizer,
    check_fits_model,
    load_plain_tokenizer,
    load_tokenizer,
    make_byte_tokenizer,
    text_offsets,
)
from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.recipe.model import BYTE_VOCAB_SIZE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("byte")
    make_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module", params=[load_tokenizer, load_plain_tokenizer])
def tokenizer(request: pytest.FixtureRequest, folder: Path) -> Tokenizer:
    loaded: Tokenizer = request.param(folder)
    return loaded


def test_bytes_and_special_tokens_have_fixed_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("12+3=") == list(b"12+3=")
    assert tokenizer.encode("é\n", special=True) == [0xC3, 0xA9, 0x0A]
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (258, BYTE_VOCAB_SIZE)
    assert tokenizer.encode("a<eos>") == [ord("a"), 258]


@given(text=st.text(st.characters(codec="utf-8")).filter(lambda s: "<" not in s))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_decoding_inverts_encoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_byte_tokenizer_lists_its_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids == {256, 257, 258}


def test_decoding_leaves_out_specials_and_ids_beyond_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([257, ord("4"), 300, ord("2"), 258, 256]) == "42"


def test_byte_tokenizer_is_reproducible_and_loads_with_transformers(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    auto = AutoTokenizer.from_pretrained(str(folder))
    assert auto.eos_token_id == 258 and auto("7=")["input_ids"] == list(b"7=")
    make_byte_tokenizer(tmp_path)
    names = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all((tmp_path / name).read_bytes() == (folder / name).read_bytes() for name in names)


def test_tokenizer_with_ids_beyond_the_vocabulary_is_rejected(tokenizer: Tokenizer) -> None:
    check_fits_model(tokenizer, 259)
    with pytest.raises(UserError, match=r"ids go up to 258, but the model's vocabulary has 256"):
        check_fits_model(tokenizer, 256)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match=r"model\.tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer.json", {"model": {"type": "Newer"}}),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Newer"}}),
        ("tokenizer_config.json", []),
    ],
)
def test_a_tokenizer_in_a_form_that_the_library_does_not_know(tmp_path: Path, name: str, change: dict[str, object] | list[object]) -> None:
    make_byte_tokenizer(tmp_path)
    file = tmp_path / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **change} if isinstance(change, dict) else change))
    with pytest.raises(UserError, match=r"model\.tokenizer: the tokenizer in .* cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_hub_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(PrerequisiteMissing, match=r"model\.tokenizer") as caught:
        load_tokenizer("missing/such-model")
    assert "\n" not in str(caught.value)


def test_chat_without_a_template(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path, chat=False)
    tokenizer = load_plain_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"data\.chat_template"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


def test_the_byte_tokenizers_conversation_is_a_line_a_message(tokenizer: Tokenizer) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "tool", "content": "1"}]
    assert tokenizer.chat_text(said) == "user: hi\nassistant: ho<eos>tool: 1\nassistant: "
    assert tokenizer.decode(tokenizer.chat(said), special=True) == tokenizer.chat_text(said)
    assert "<eos>" not in tokenizer.decode(tokenizer.chat(said))


def test_byte_template_renders_tools_as_signatures(tokenizer: Tokenizer) -> None:
    """Their schemas would take most of a toy's context."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}, {"name": "now"}]
    text = tokenizer.decode(tokenizer.chat([{"role": "user", "content": "1 2"}], tools))
    assert text == "functions: add(a, b), now()\nuser: 1 2\nassistant: "


def test_a_prompt_stays_open_whatever_the_tokenizer_closes(tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import processors

    make_byte_tokenizer(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 257), ("<eos>", 258)])
    inner.save(str(tmp_path / "tokenizer.json"))
    created = load_tokenizer(tmp_path)
    assert created.encode("7=", special=True) == [257, *b"7="]
    assert created.encode("7=") == list(b"7=")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endfor %}", "System role not"),
        ("{{ messages", "unexpected end of template"),
    ],
)
def test_error_of_a_chat_template_is_one_line(tmp_path: Path, template: str, reason: str) -> None:
    make_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=rf"data\.chat_template: .* of system and user \({reason}"):
        load_tokenizer(tmp_path).chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "7="}])


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
    tokenizer = load_plain_tokenizer(tmp_path)
    assert tokenizer.token_bytes([258, 65, 0xC3, 100_000, -1]) == [b"<eos>", b"A", b"\xc3", b"", b""]


def test_offsets_of_partial_characters_are_within_the_text() -> None:
    pieces = [b"\xe2\x98", b"", b"a", b"\xc3", b"\xa9", b"\xff"]
    text = b"".join(pieces).decode(errors="replace")
    assert text == "\ufffda\xe9\ufffd" and text_offsets(pieces, text) == [0, 0, 0, 2, 2, 3]
