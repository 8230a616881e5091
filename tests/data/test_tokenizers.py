"""The byte tokenizer is an ordinary Hugging Face folder with known ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtpctl.data.tokenizers import Tokenizer, check_fits_model, load_byte_tokenizer, load_tokenizer, make_byte_tokenizer
from mtpctl.errors import EnvironmentMissing, UserError
from mtpctl.recipe.model import BYTE_VOCAB_SIZE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("byte")
    make_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module", params=[load_tokenizer, load_byte_tokenizer])
def tokenizer(request: pytest.FixtureRequest, folder: Path) -> Tokenizer:
    loaded: Tokenizer = request.param(folder)
    return loaded


def test_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("12+3=") == list(b"12+3=")
    assert tokenizer.encode("é\n", special=True) == [0xC3, 0xA9, 0x0A]
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (258, BYTE_VOCAB_SIZE)
    assert tokenizer.encode("a<eos>") == [ord("a"), 258]


@given(text=st.text(st.characters(codec="utf-8")).filter(lambda s: "<" not in s))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_its_special_tokens_are_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids == {256, 257, 258}


def test_decoding_leaves_out_specials_and_ids_beyond_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([257, ord("4"), 300, ord("2"), 258, 256]) == "42"


def test_auto_tokenizer_loads_it_and_the_files_are_the_same_each_time(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    auto = AutoTokenizer.from_pretrained(str(folder))
    assert auto.eos_token_id == 258 and auto("7=")["input_ids"] == list(b"7=")
    make_byte_tokenizer(tmp_path)
    names = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all((tmp_path / name).read_bytes() == (folder / name).read_bytes() for name in names)


def test_fit(tokenizer: Tokenizer) -> None:
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
    with pytest.raises(EnvironmentMissing, match=r"model\.tokenizer") as caught:
        load_tokenizer("nobody/such-model")
    assert "\n" not in str(caught.value)


def test_chat_without_a_template(tmp_path: Path) -> None:
    make_byte_tokenizer(tmp_path, chat=False)
    tokenizer = load_byte_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"data\.chat_template"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


def test_the_byte_tokenizers_conversation_is_a_line_a_message(tokenizer: Tokenizer) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "tool", "content": "1"}]
    assert tokenizer.chat_text(said) == "user: hi\nassistant: ho<eos>tool: 1\nassistant: "
    assert tokenizer.decode(tokenizer.chat(said), special=True) == tokenizer.chat_text(said)
    assert "<eos>" not in tokenizer.decode(tokenizer.chat(said))


def test_a_prompt_stays_open_whatever_the_tokenizer_closes(tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import processors

    make_byte_tokenizer(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 257), ("<eos>", 258)])
    inner.save(str(tmp_path / "tokenizer.json"))
    made = load_tokenizer(tmp_path)
    assert made.encode("7=", special=True) == [257, *b"7="]
    assert made.encode("7=") == list(b"7=")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endfor %}", "System role not"),
        ("{{ messages", "unexpected end of template"),
    ],
)
def test_a_template_that_refuses_is_one_line(tmp_path: Path, template: str, reason: str) -> None:
    make_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=rf"data\.chat_template: .* of system and user \({reason}"):
        load_tokenizer(tmp_path).chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "7="}])
