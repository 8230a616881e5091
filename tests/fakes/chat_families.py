"""Ten chat templates with the token conventions of model families, and by hand what each writes behind a turn of the model.

The templates are data of the tests: what a family's template does with earlier turns, thinking, tools and its first token is in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast

from mtpctl.data.tokenizers import HfTokenizer

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Family:
    """One family: its template, its tokens, which of them end a turn, and the roles that an environment may answer in, as sequences.

    `behind(messages)` is the text from the end of the model's turn to the beginning of its next one.
    """

    name: str
    template: str
    specials: list[str]
    ends: list[str]
    replies: list[list[str]]
    behind: Callable[[Messages], str]


def _chatml(messages: Messages, opening: str = "") -> str:
    body = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return f"<|im_end|>\n{body}<|im_start|>assistant\n{opening}"


def _qwen(messages: Messages) -> str:
    """Tool results in a row are one message of the user."""
    text, within = "<|im_end|>\n", False
    for message in messages:
        if message["role"] == "tool":
            text += ("" if within else "<|im_start|>user") + f"\n<tool_response>\n{message['content']}\n</tool_response>"
            within = True
            continue
        text += "<|im_end|>\n" if within else ""
        within = False
        text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    return text + ("<|im_end|>\n" if within else "") + "<|im_start|>assistant\n"


def _deepseek(messages: Messages) -> str:
    return "<｜end▁of▁sentence｜>" + "".join(f"<｜User｜>{m['content']}" for m in messages) + "<｜Assistant｜><think>\n"


def _glm(messages: Messages) -> str:
    said = {"user": "<|user|>\n{}", "tool": "<|observation|>\n<tool_response>\n{}\n</tool_response>"}
    return "".join(said[m["role"]].format(m["content"]) for m in messages) + "<|assistant|>"


def _llama(messages: Messages) -> str:
    roles = {"tool": "ipython"}
    body = "".join(
        f"<|start_header_id|>{roles.get(m['role'], m['role'])}<|end_header_id|>\n\n{m['content'].strip()}<|eot_id|>" for m in messages
    )
    return f"<|eot_id|>{body}<|start_header_id|>assistant<|end_header_id|>\n\n"


def _gemma(messages: Messages) -> str:
    return f"<end_of_turn>\n<start_of_turn>user\n{messages[0]['content'].strip()}<end_of_turn>\n<start_of_turn>model\n"


CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN_TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\nYou call functions.\n<tools>' }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Thinking of turns before the last question is left out, and the last turn of the model gets an empty one.
QWEN_THINKING = """\
{%- set ns = namespace(asked=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set said = m.content.split('</think>')[-1].lstrip('\n') %}
{%- if loop.index0 > ns.last_user and loop.last %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + said }}
{%- else %}{{ '<|im_start|>assistant\n' + said }}{% endif %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

DEEPSEEK = """\
{{- '<｜begin▁of▁sentence｜>' }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""

# The header of the next message is what ends a turn.
GLM = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}{{ '<|system|>\n# Tools' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>\n<think></think>\n' + m.content.strip() }}
{%- elif m.role == 'tool' %}{{ '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

LLAMA = """\
{{- '<|begin_of_text|>' }}
{%- for m in messages %}
{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Tools stand before the last question, wherever that is.
MISTRAL = """\
{{- '<s>' }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user and assistant') }}{% endif %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- else %}{{ ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}"""

MIMO = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are MiMo.<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- set said = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}
{{- '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"""

GEMMA = """\
{{- '<bos>' }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user and model') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

ZEPHYR = """\
{{- '<s>' }}
{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

_IM = ["<|im_end|>", "<|endoftext|>", "<|im_start|>"]
_ANY = [["user"], ["tool"], ["tool", "tool"], ["tool", "user"]]

FAMILIES = [
    Family("chatml", CHATML, _IM, _IM[:1], [["user"], ["tool"], ["system", "user"]], _chatml),
    Family("qwen2.5", QWEN_TOOLS, _IM, _IM[:2], _ANY, _qwen),
    Family("qwen3", QWEN_THINKING, _IM, _IM[:2], _ANY, _qwen),
    Family(
        "deepseek",
        DEEPSEEK,
        ["<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        ["<｜end▁of▁sentence｜>"],
        [["user"], ["user", "user"]],
        _deepseek,
    ),
    Family(
        "glm",
        GLM,
        ["<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>"],
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
        _ANY,
        _glm,
    ),
    Family(
        "llama",
        LLAMA,
        ["<|eot_id|>", "<|eom_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        ["<|eot_id|>", "<|eom_id|>"],
        _ANY,
        _llama,
    ),
    Family(
        "mistral",
        MISTRAL,
        ["</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
        ["</s>"],
        [["user"]],
        lambda messages: f"</s>[INST] {messages[0]['content']}[/INST]",
    ),
    Family("mimo", MIMO, _IM, _IM[:1], [["user"], ["user", "user"]], lambda messages: _chatml(messages, "<think>")),
    Family("gemma", GEMMA, ["<end_of_turn>", "<eos>", "<bos>", "<start_of_turn>"], ["<end_of_turn>", "<eos>"], [["user"]], _gemma),
    Family(
        "zephyr",
        ZEPHYR,
        ["</s>", "<s>"],
        ["</s>"],
        [["user"], ["system", "user"]],
        lambda messages: "</s>\n" + "".join(f"<|{m['role']}|>\n{m['content']}</s>\n" for m in messages) + "<|assistant|>\n",
    ),
]

_PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Added tokens that are text."""
_CORPUS = [
    "the model calls a tool and thinks about the answer of the tool",
    "</call> calls called user assistant system",
    "1 12 123 1234",
] * 4


def tokenizer_of(family: Family) -> HfTokenizer:
    """A byte-level BPE tokenizer with some merges, so that a text has many tokenisations, and with the family's tokens and template."""
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False))
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.specials])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in _PLAIN])
    inner = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=family.specials[0], clean_up_tokenization_spaces=False)
    inner.chat_template = family.template
    return HfTokenizer(inner, family.name, ignore_tools=True)  # not all of these templates show tools
