"""The tokens that end a response: one set for a run, and the one of them that the supervised stage trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpctl.data.end_tokens import EndTokens, config_end_ids, end_tokens, recipe_end_tokens
from mtpctl.data.problems import Problem
from mtpctl.data.prompts import encode_conversation, encode_sft
from mtpctl.data.tokenizers import HfTokenizer, load_tokenizer
from mtpctl.errors import UserError
from mtpctl.families.configs import hub_config
from mtpctl.recipe.data import DataConfig
from mtpctl.recipe.model import ModelConfig
from mtpctl.recipe.rollout import VllmConfig
from tests.fakes.chat_families import FAMILIES, tokenizer_of

BY_NAME = {family.name: family for family in FAMILIES}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, HfTokenizer]:
    return {family.name: tokenizer_of(family) for family in FAMILIES}


def tokens_of(tokenizer: HfTokenizer, *texts: str) -> list[int]:
    ids = tokenizer.encode("".join(texts))
    assert len(ids) == len(texts), "each is one token"
    return ids


def talk(*contents: str) -> Problem:
    return Problem("c.jsonl:1", "", "", messages=[{"role": ("user", "assistant")[n % 2], "content": c} for n, c in enumerate(contents)])


def trained(tokenizer: HfTokenizer, problem: Problem, ends: EndTokens) -> list[str]:
    """The runs of text that are trained on, special tokens included."""
    _, target, mask = encode_conversation(tokenizer, problem, ends=ends)
    runs: list[list[int]] = [[]]
    for token, one in zip(target, mask, strict=True):
        if one:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, special=True) for run in runs if run]


def write_model(folder: Path, config: dict[str, Any], generation: object = None) -> ModelConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], **config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(generation if isinstance(generation, str) else json.dumps(generation))
    return ModelConfig(path=str(folder))


def test_the_set_is_the_union_of_tokenizer_configs_template_and_stop_ids_with_sources(
    tmp_path: Path, tokenizers: dict[str, HfTokenizer]
) -> None:
    glm = tokenizers["glm"]
    endoftext, user, observation, system = tokens_of(glm, "<|endoftext|>", "<|user|>", "<|observation|>", "<|system|>")
    config = {"eos_token_id": endoftext, "text_config": {"eos_token_id": [user, -1]}}
    model = write_model(tmp_path, config, {"eos_token_id": [endoftext, user, observation, 100_000]})
    ends = end_tokens(glm, VllmConfig(stop_ids=[system, user]), config_end_ids(model, config), vocab=glm.vocab_size)
    assert {token.text: token.sources for token in ends.tokens} == {
        "<|endoftext|>": ("tokenizer", "generation_config.json", "config.json"),
        "<|user|>": ("generation_config.json", "text_config", "rollout.stop_ids"),
        "<|observation|>": ("generation_config.json",),
        "<|system|>": ("rollout.stop_ids",),
    }
    assert ends.ids[0] == endoftext and ends.disagreement == ""


def test_end_ids_replace_the_models_tokens_and_stop_ids_stay(tokenizers: dict[str, HfTokenizer]) -> None:
    glm = tokenizers["glm"]
    ends = end_tokens(glm, VllmConfig(end_ids=[5, 6], stop_ids=[6, 7]), {8: ["generation_config.json"]})
    assert [(token.id, token.sources) for token in ends.tokens] == [
        (5, ("rollout.end_ids",)),
        (6, ("rollout.end_ids", "rollout.stop_ids")),
        (7, ("rollout.stop_ids",)),
    ]


@pytest.mark.parametrize("value", ["2", True, [1, "2"], [[1]], {"id": 1}, 2.5])
def test_an_invalid_eos_token_id_is_a_one_line_error(tmp_path: Path, value: object) -> None:
    with pytest.raises(UserError, match=r"^model: eos_token_id of generation_config\.json must be a token id or a list of them"):
        config_end_ids(write_model(tmp_path, {}, {"eos_token_id": value}), {})


def test_generation_config_that_is_not_json_is_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"generation_config\.json cannot be read as JSON") as caught:
        config_end_ids(write_model(tmp_path, {}, '{"eos'), {})
    assert "\n" not in str(caught.value)


def test_a_recipes_set_is_known_without_a_network(tmp_path: Path, tokenizers: dict[str, HfTokenizer]) -> None:
    glm = tokenizers["glm"]
    (user,) = tokens_of(glm, "<|user|>")
    glm.inner.save_pretrained(tmp_path)
    ends, missing = recipe_end_tokens(write_model(tmp_path, {"eos_token_id": [user]}), VllmConfig())
    assert [token.text for token in ends.tokens] == ["<|endoftext|>", "<|user|>"] and missing == ""
    ends, missing = recipe_end_tokens(ModelConfig(path="someone/not-here"), VllmConfig(stop_ids=[3]))
    assert ends.ids == (3,) and missing == "the tokenizer of someone/not-here is not downloaded yet"


def test_tokenizer_without_eos_uses_eos_of_model_configs(tmp_path: Path) -> None:
    glm = tokenizer_of(BY_NAME["glm"])
    (user,) = tokens_of(glm, "<|user|>")
    glm.inner.eos_token = None
    glm.inner.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has no eos_token"):
        load_tokenizer(tmp_path)
    ends, _ = recipe_end_tokens(write_model(tmp_path, {}, {"eos_token_id": [user]}), VllmConfig())
    assert [(token.text, token.sources) for token in ends.tokens] == [("<|user|>", ("generation_config.json",))]
    assert load_tokenizer(tmp_path).eos_id == user


CLOSED = {
    "chatml": "<|im_end|>",
    "qwen2.5": "<|im_end|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "llama": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "zephyr": "</s>",
    "mistral": "</s>",
    "mimo": "<|im_end|>",
}


@pytest.mark.parametrize(("name", "closing"), CLOSED.items())
def test_every_turn_trains_the_end_token_of_the_template(name: str, closing: str, tokenizers: dict[str, HfTokenizer]) -> None:
    tokenizer = tokenizers[name]
    ends = end_tokens(tokenizer)
    assert [tokenizer.decode([ends.closing or 0], special=True)] == [closing]
    opened = "<think>\n" if name == "deepseek" else "<think>" if name == "mimo" else ""
    if opened:  # these open a turn with thinking that they do not write for earlier turns
        with pytest.raises(UserError, match="does not begin an assistant's turn with its generation prompt"):
            encode_conversation(tokenizer, talk("a", "b"), ends=ends)
        return
    runs = [run.strip() for run in trained(tokenizer, talk("one?", "one", "two?", "two"), ends)]
    assert runs == [f"one{closing}", f"two{closing}"]


def test_a_turn_that_the_template_does_not_close_trains_the_first_token_of_the_next_role(tokenizers: dict[str, HfTokenizer]) -> None:
    glm = tokenizers["glm"]
    named = {token: ["generation_config.json"] for token in tokens_of(glm, "<|endoftext|>", "<|user|>", "<|observation|>")}
    ends = end_tokens(glm, VllmConfig(), named)
    assert ends.closing is None
    messages = [*talk("1+1?", "2", "2+2?", "add(2, 2)").messages, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "4"}]
    assert trained(glm, Problem("c", "", "", messages=messages), ends) == [
        "\n<think></think>\n2<|user|>",
        "\n<think></think>\nadd(2, 2)<|observation|>",
        "\n<think></think>\n4<|user|>",
    ]
    only_eos = end_tokens(glm)
    assert trained(glm, talk("1+1?", "2"), only_eos) == ["\n<think></think>\n2<|endoftext|>"]


def test_a_last_turn_that_calls_a_tool_ends_before_the_tools_answer(tokenizers: dict[str, HfTokenizer]) -> None:
    glm = tokenizer_of(BY_NAME["glm"])
    assert isinstance(glm.inner.chat_template, str)
    shown = "{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>' + c.function.name + '</tool_call>' }}{% endfor %}"
    glm.inner.chat_template = glm.inner.chat_template.replace("m.content.strip() }}", "m.content.strip() }}" + shown)
    ends = end_tokens(glm, VllmConfig(), {token: ["x"] for token in tokens_of(glm, "<|user|>", "<|observation|>")})
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    problem = Problem("c", "", "", messages=[{"role": "user", "content": "1+1?"}, call], fields={"tools": [TOOL]})
    assert trained(glm, problem, ends) == ["\n<think></think>\n\n<tool_call>add</tool_call><|observation|>"]


def test_another_special_token_at_the_end_is_not_an_end_token(tokenizers: dict[str, HfTokenizer]) -> None:
    glm = tokenizers["glm"]
    ends = end_tokens(glm)
    assert trained(glm, talk("1+1?", "2<|system|>"), ends) == ["\n<think></think>\n2<|system|><|endoftext|>"]


def test_a_template_that_disagrees_with_the_model_is_reported_and_both_tokens_end(tokenizers: dict[str, HfTokenizer]) -> None:
    base = tokenizer_of(BY_NAME["chatml"])
    endoftext, im_end = tokens_of(base, "<|endoftext|>", "<|im_end|>")
    base.eos_id = endoftext
    ends = end_tokens(base, VllmConfig(), {endoftext: ["config.json"]})
    assert ends.ids == (endoftext, im_end)
    assert f"closes a turn with {im_end} '<|im_end|>', which is not an end token of the model" in ends.disagreement
    assert trained(base, talk("1+1?", "2"), ends) == ["2<|im_end|>"]
    left_out = end_tokens(base, VllmConfig(end_ids=[endoftext]))
    assert left_out.ids == (endoftext,) and "rollout.end_ids does not contain" in left_out.disagreement


def test_a_solution_ends_as_its_prompt_is_rendered(tokenizers: dict[str, HfTokenizer]) -> None:
    base = tokenizer_of(BY_NAME["chatml"])
    endoftext, im_end = tokens_of(base, "<|endoftext|>", "<|im_end|>")
    base.eos_id = endoftext
    ends, problem = end_tokens(base), Problem("p", "1+1?", "2")
    assert encode_sft(base, problem, DataConfig(), ends=ends).target[-1] == endoftext
    assert encode_sft(base, problem, DataConfig(chat_template=True), ends=ends).target[-1] == im_end
    closed = encode_sft(base, Problem("p", "1+1?", "2<|im_end|>"), DataConfig(chat_template=True), ends=ends)
    assert closed.target == [*base.encode("2"), im_end]


def test_end_token_not_marked_special_is_removed_from_text(tokenizers: dict[str, HfTokenizer]) -> None:
    tokenizer = tokenizer_of(BY_NAME["chatml"])
    (think,) = tokens_of(tokenizer, "</think>")
    ids = [*tokenizer.encode("4"), think]
    end_tokens(tokenizer, VllmConfig(stop_ids=[think]))
    assert tokenizer.decode(ids) == "4</think>"
    end_tokens(tokenizer, VllmConfig(), {think: ["generation_config.json"]})
    assert (tokenizer.decode(ids), tokenizer.decode(ids, special=True)) == ("4", "4</think>")


@pytest.mark.parametrize(
    ("hub_id", "expected"),
    [
        ("zai-org/GLM-4.6", {151329: "config.json", 151336: "config.json", 151338: "config.json"}),
        ("zai-org/GLM-4.7", {151329: "config.json", 151336: "config.json", 151338: "config.json"}),
        ("zai-org/GLM-4.7-Flash", {154820: "config.json", 154827: "config.json", 154829: "config.json"}),
        ("baidu/ERNIE-4.5-21B-A3B-PT", {2: "config.json"}),
        ("Qwen/Qwen3.6-35B-A3B", {248044: "text_config"}),
        ("Qwen/Qwen3.8-2.4T-A95B", {248044: "config.json"}),
    ],
)
def test_end_tokens_of_published_configs(hub_id: str, expected: dict[int, str]) -> None:
    sources = config_end_ids(ModelConfig(path=hub_id), hub_config(hub_id))
    assert sources == {token: [source] for token, source in expected.items()}
