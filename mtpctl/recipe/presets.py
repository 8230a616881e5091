"""Published algorithms: the defaults of `train.rl` that each `train.rl.preset` sets. docs/objectives.md has papers and formulas.

A preset sets the paper's loss, advantage, aggregation, clips and sampling. Sizes, steps and learning rates depend on the model and are not
part of a preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _preset(
    loss: str, advantage: str, aggregate: str, *, clip: tuple[float, float] | None = (0.2, 0.2), **others: object
) -> dict[str, object]:
    clips = {} if clip is None else {"clip_low": clip[0], "clip_high": clip[1]}
    return {"loss": loss, "advantage": advantage, "aggregate": aggregate, **clips, "dynamic_sampling": False, **others}


_DAPO: dict[str, Any] = {"dynamic_sampling": True, "overlong": {"enabled": True}}

PRESETS: dict[str, dict[str, object]] = {
    # DeepSeekMath (arXiv 2402.03300).
    "grpo": _preset("ppo", "grpo", "sequence", kl_coef=0.04, kl_estimator="k3"),
    # arXiv 2503.14476.
    "dapo": _preset("ppo", "grpo", "token", clip=(0.2, 0.28), kl_coef=0.0, **_DAPO),
    # arXiv 2503.20783.
    "dr_grpo": _preset("ppo", "grpo_no_std", "constant", kl_coef=0.0),
    # arXiv 2501.03262. The KL penalty is the k2 loss in both variants; its weight, kl_coef, is up to the user.
    "reinforce++": _preset("ppo", "reinforce_pp", "token", kl_estimator="k2"),
    "reinforce++_baseline": _preset("ppo", "reinforce_pp_baseline", "token", kl_estimator="k2"),
    # arXiv 2507.18071.
    "gspo": _preset("gspo", "grpo", "sequence", clip=(3e-4, 4e-4), kl_coef=0.0),
    # MiniMax-M1 (arXiv 2506.13585) clips the weight only above and does not publish the bound. ScaleRL (arXiv 2510.13786) uses 5.
    "cispo": _preset("cispo", "grpo", "token", clip=(1.0, 4.0), kl_coef=0.0, **_DAPO),
    # arXiv 2511.20347.
    "sapo": _preset("sapo", "grpo", "sequence", clip=None, tau_pos=1.0, tau_neg=1.05, kl_coef=0.0),
}


def with_preset(preset: Mapping[str, object], section: Mapping[str, object]) -> dict[str, object]:
    """A section with the preset's values for keys that it does not set, in nested mappings too."""
    merged = dict(section)
    for name, value in preset.items():
        if name not in section:
            merged[name] = dict(value) if isinstance(value, Mapping) else value
        elif isinstance(value, Mapping) and isinstance(nested := section[name], Mapping):
            merged[name] = with_preset(value, nested)
    return merged
