"""Which fields of a chat request are honored, accepted without effect, or rejected.

No field that would change an answer is dropped silently. A field that is not honored, known or unknown, is an error that names it, unless
its value is the default behavior. With `rollout.gateway_fields: ignore` it is listed in a header of the answer instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mtpctl.web.json_body import shown

WITHOUT_EFFECT = frozenset(
    {
        "user",
        "safety_identifier",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "request_id",
        "session_id",
    }
)
"""Bookkeeping fields of a provider, which do not change an answer."""
ACCEPTED_VALUES: Mapping[str, tuple[object, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "cache_salt": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "ec_transfer_params": (),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logprob_token_ids": (),
    "media_io_kwargs": (),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
"""Fields that are not honored, each with the accepted values, which are the default behavior. Null is always accepted."""


@dataclass(frozen=True)
class FieldRules:
    """`serving`: there is no training, so clients set sampling. `ignore`: fields that are not honored are listed instead of rejected."""

    serving: bool = False
    ignore: bool = False


def not_honored(others: Mapping[str, object], honored: Collection[str]) -> dict[str, str]:
    """The rejected fields of a request, each with the reason. `others`: its fields that are not in `honored`."""
    reasons: dict[str, str] = {}
    for name, value in others.items():
        if name in WITHOUT_EFFECT or (name in ACCEPTED_VALUES and (value is None or value in ACCEPTED_VALUES[name])):
            continue
        if name in ACCEPTED_VALUES:
            reasons[name] = "is not supported; leave it out"
            continue
        near = difflib.get_close_matches(name[:40], [*honored, *ACCEPTED_VALUES], 1)
        reasons[shown(name)[1:-1]] = f"is not a field of a chat request{f'; did you mean {near[0]}?' if near else ''}"
    return reasons
