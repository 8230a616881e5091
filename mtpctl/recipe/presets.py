"""Published algorithms by name: what `train.rl.preset` makes the defaults of `train.rl`. docs/objectives.md has papers and formulas.

A preset sets what its paper says about loss, advantages, aggregation, clips and sampling. It says nothing about sizes, steps and learning
rates, which depend on the model.
"""

from __future__ import annotations

from collections.abc import Mapping

_SYMMETRIC: dict[str, object] = {"clip_low": 0.2, "clip_high": 0.2}

PRESETS: dict[str, dict[str, object]] = {
    # DeepSeekMath (arXiv 2402.03300).
    "grpo": {
        "loss": "ppo",
        "advantage": "grpo",
        "aggregate": "sequence",
        **_SYMMETRIC,
        "kl_coef": 0.04,
        "kl_estimator": "k3",
        "dynamic_sampling": False,
    },
    # arXiv 2503.14476.
    "dapo": {
        "loss": "ppo",
        "advantage": "grpo",
        "aggregate": "token",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "kl_coef": 0.0,
        "dynamic_sampling": True,
        "overlong": {"enabled": True},
    },
    # arXiv 2503.20783.
    "dr_grpo": {
        "loss": "ppo",
        "advantage": "grpo_no_std",
        "aggregate": "constant",
        **_SYMMETRIC,
        "kl_coef": 0.0,
        "dynamic_sampling": False,
    },
    # arXiv 2501.03262, both of its variants. The KL of either is the k2 loss here; its weight, kl_coef, is for the user to set.
    "reinforce++": {
        "loss": "ppo",
        "advantage": "reinforce_pp",
        "aggregate": "token",
        **_SYMMETRIC,
        "kl_estimator": "k2",
        "dynamic_sampling": False,
    },
    "reinforce++_baseline": {
        "loss": "ppo",
        "advantage": "reinforce_pp_baseline",
        "aggregate": "token",
        **_SYMMETRIC,
        "kl_estimator": "k2",
        "dynamic_sampling": False,
    },
    # arXiv 2507.18071.
    "gspo": {
        "loss": "gspo",
        "advantage": "grpo",
        "aggregate": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "kl_coef": 0.0,
        "dynamic_sampling": False,
    },
    # MiniMax-M1 (arXiv 2506.13585), which bounds the weight above alone and does not tell its bound: 5 is among those that ScaleRL
    # (arXiv 2510.13786) uses.
    "cispo": {
        "loss": "cispo",
        "advantage": "grpo",
        "aggregate": "token",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "kl_coef": 0.0,
        "dynamic_sampling": True,
        "overlong": {"enabled": True},
    },
    # arXiv 2511.20347.
    "sapo": {
        "loss": "sapo",
        "advantage": "grpo",
        "aggregate": "sequence",
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "kl_coef": 0.0,
        "dynamic_sampling": False,
    },
}


def laid_over(preset: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """The keys of a section: those that are given, and the preset's for the others, below mappings as well."""
    merged = dict(given)
    for name, value in preset.items():
        if name not in given:
            merged[name] = dict(value) if isinstance(value, Mapping) else value
        elif isinstance(value, Mapping) and isinstance(below := given[name], Mapping):
            merged[name] = laid_over(value, below)
    return merged
