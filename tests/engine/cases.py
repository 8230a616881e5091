"""Layouts that an update is compared over, each with the single process that it must equal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mtpctl.recipe.schema import MtpConfig, ParallelConfig

MODELS: dict[str, dict[str, Any]] = {
    "mimo": {"num_hidden_layers": 3, "num_nextn_predict_layers": 2},
    "tied": {"num_hidden_layers": 3, "tie_word_embeddings": True},
}


@dataclass(frozen=True)
class Case:
    """like: the case of one process that it must equal; restore: the case whose checkpoint it begins from."""

    name: str
    parallel: ParallelConfig
    model: str = "mimo"
    fields: dict[str, Any] = field(default_factory=dict)
    like: str = ""
    saved: bool = False
    restore: str = ""


def _case(
    name: str,
    model: str = "mimo",
    mode: str = "joint",
    *,
    fields: dict[str, Any] | None = None,
    saved: bool = False,
    restore: str = "",
    **parallel: Any,
) -> Case:
    mtp = MtpConfig(mode=mode, loss_scale=0.3, clip_grad=0)  # type: ignore[arg-type]
    settings = {"mtp": mtp, "tokens_per_microbatch": 50, **(fields or {})}
    return Case(name, ParallelConfig(**parallel), model, settings, f"{model}-{mode}", saved, restore)


SHARDED = {"distributed_optimizer": True}
BF16 = {"precision": "bf16"}

CASES = [
    *(_case(f"{model}-{mode}", model, mode, saved=True) for model in MODELS for mode in ("joint", "isolated")),
    _case("tp2", tp=2),
    _case("sp2", tp=2, sequence_parallel=True),
    _case("pp2", pp=2),
    _case("pp2-mtp-alone", pp=2, pp_layout=[3, 0]),
    _case("dp2", dp=2),
    _case("cp2", cp=2),
    _case("dp2-sharded", dp=2, fields=SHARDED, saved=True),
    *(
        _case(f"{name}-tied-{mode}", "tied", mode, **p)
        for mode in ("joint", "isolated")
        for name, p in (("tp2", {"tp": 2}), ("pp2", {"pp": 2}))
    ),
    _case("sp2-isolated", mode="isolated", tp=2, sequence_parallel=True),
    _case("sp2-pp2", tp=2, sequence_parallel=True, pp=2, saved=True),
    _case("sp2-cp2", tp=2, sequence_parallel=True, cp=2),
    _case("pp2-dp2", pp=2, dp=2),
    _case("cp2-dp2", cp=2, dp=2),
    _case("one-to-tp2", tp=2, restore="mimo-joint"),
    _case("one-to-dp2-sharded", dp=2, fields=SHARDED, restore="mimo-joint"),
    _case("dp2-sharded-to-tp2-sharded", tp=2, fields=SHARDED, restore="dp2-sharded"),
    _case("sp2-pp2-to-one", restore="sp2-pp2"),
    _case("sp2-pp2-to-pp2-dp2", pp=2, dp=2, restore="sp2-pp2"),
    _case("tied-to-pp2", "tied", pp=2, restore="tied-joint"),
]
