"""`mtpctl doctor --mismatch`: names the first module whose outputs differ between engine and trainer at the same weights."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtpctl.controller.prepare import open_model, open_tokenizer
from mtpctl.data.prompts import encode_prompt
from mtpctl.data.sets import first_problems
from mtpctl.data.tokenizers import check_fits_model
from mtpctl.doctor.mismatch_parts import WORST_FACTOR, LogprobDifference, ModuleDifference, Request
from mtpctl.doctor.parts import AGREEMENT_BOUNDS, run_part
from mtpctl.errors import ThresholdMissed, UserError
from mtpctl.jobs.targets import load_target
from mtpctl.recipe.checks import validate
from mtpctl.recipe.rollout import VllmConfig
from mtpctl.recipe.schema import Recipe

RESPONSE_TOKENS = 128
DEADLINE_S = {"mismatch-engine": 1200.0, "mismatch-trainer": 900.0}
"""Time limit of each part, in seconds. The limit of the engine is long, because on a GPU it may start twice and compile once."""
_LAYER = re.compile(r"(\d+)\.(\w+)$")
_NAMES = {
    "norm1": "attention norm",
    "attention": "attention",
    "norm2": "MLP norm",
    "mlp": "MLP",
    "experts": "experts",
    "embedding": "embedding",
    "final_norm": "final norm",
    "head": "LM head",
}
_HINTS = {
    "norm1": "Compare its weight and epsilon",
    "attention": "Compare its weights, rope, masks and windows, and the engine's attention backend (rollout.engine_args)",
    "norm2": "Compare its weight and epsilon",
    "mlp": "Compare its weights and activation",
    "experts": "Compare its weights and the router's settings. If `train.moe.replay: rollout` is not set, engine and trainer may also "
    "select different experts where router scores nearly tie",
    "embedding": "Compare its weight and scale",
    "final_norm": "Compare its weight and epsilon",
    "head": "Compare its weight, scale and temperature",
}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Differences of all modules, in the order of the forward pass, and of log-probs.

    limit: the largest mean difference of a module that rounding explains; 0 with `numerics: bitwise`. moe_layers: layers whose MLP is a
    mixture of experts. is_bitwise: the recipe has `numerics: bitwise`.
    """

    modules: list[ModuleDifference]
    logprobs: list[LogprobDifference]
    limit: float
    precision: str
    moe_layers: list[int]
    seconds: float = 0.0
    is_bitwise: bool = False

    @classmethod
    def from_result(cls, document: dict[str, Any], seconds: float) -> Mismatch:
        """The differences in a result of `mismatch_parts.score`."""
        modules = [ModuleDifference(**fields) for fields in document["modules"]]
        logprobs = [LogprobDifference(**fields) for fields in document["logprobs"]]
        return cls(modules, logprobs, document["limit"], document["precision"], document["moe_layers"], seconds, document["bitwise"])

    @property
    def first(self) -> ModuleDifference | None:
        """The first module that differs by more than rounding explains."""
        return next((module for module in self.modules if module.exceeds(self.limit)), None)

    @property
    def bound(self) -> float:
        """The largest permitted mean difference of log-probs, in nats."""
        return 0.0 if self.is_bitwise else AGREEMENT_BOUNDS[self.precision]

    def label(self, name: str) -> str:
        """The name of a module for users."""
        match = _LAYER.match(name)
        return _NAMES[name] if match is None else f"layer {match[1]}, {_NAMES[self._kind(name)]}"

    def _kind(self, name: str) -> str:
        match = _LAYER.match(name)
        if match is None:
            return name
        return "experts" if match[2] == "mlp" and int(match[1]) in self.moe_layers else match[2]

    @property
    def verdict(self) -> str:
        """The result in one sentence, with a fix."""
        if (first := self.first) is not None:
            return (
                f"{self.label(first.name)}: engine and trainer differ by {first.mean:.1e} ({first.worst:.1e} at the worst token) with the "
                f"same inputs; {self._explanation}. {_HINTS[self._kind(first.name)]}"
            )
        if (difference := next((each for each in self.logprobs if not each.mean <= self.bound), None)) is not None:
            return (
                f"{difference.source}: log-probs differ from the trainer's by {difference.mean:.1e} nats on average (bound "
                f"{self.bound:g}), although each module agrees within rounding. Look for the difference in how this pass runs, or set "
                "train.precision: fp32"
            )
        largest = max(self.modules, key=lambda module: module.mean)
        return (
            f"engine, log-prob server and trainer agree: the largest difference is {largest.mean:.1e} ({self.label(largest.name)}), and "
            f"{self._explanation}"
        )

    @property
    def _explanation(self) -> str:
        if self.is_bitwise:
            return "numerics: bitwise allows no difference"
        return f"rounding in {self.precision} explains {self.limit:.1e}"

    @property
    def error(self) -> ThresholdMissed | None:
        agrees = self.first is None and all(difference.mean <= self.bound for difference in self.logprobs)
        return None if agrees else ThresholdMissed(self.verdict)

    def to_dict(self) -> dict[str, object]:
        """JSON-ready: all differences, the limits, the verdict and the exit code."""
        error = self.error
        modules = [asdict(module) | {"name": self.label(module.name), "exceeds": module.exceeds(self.limit)} for module in self.modules]
        return {
            "modules": modules,
            "logprobs": [asdict(difference) for difference in self.logprobs],
            "limit": self.limit,
            "worst_limit": WORST_FACTOR * self.limit,
            "logprob_bound": self.bound,
            "precision": self.precision,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "exit_code": 0 if error is None else error.exit_code,
        }


def examine_mismatch(target: str) -> Mismatch:
    """Run one response of the recipe's model through vLLM (`rollout.tp` ranks), the log-prob server and the trainer (one rank each).

    With `numerics: bitwise` on a GPU, vLLM also runs on one rank.

    Args:
        target: a recipe or a run. The weights are those before training. The prompt is the first training problem, cut to half the context.

    Raises:
        UserError: for a recipe with another engine, or without a problem.
        PrerequisiteMissing, RuntimeFailure: if engine or trainer do not run here.
    """
    started_at = time.perf_counter()
    recipe = load_target(target).recipe
    if not isinstance(recipe.rollout, VllmConfig):
        raise UserError("rollout.engine: --mismatch compares the trainer with vLLM; set vllm")
    validate(recipe)
    with tempfile.TemporaryDirectory(prefix="mtpctl-mismatch-") as scratch:
        folder = Path(scratch)
        _build_request(recipe, folder).write(folder)
        document = asyncio.run(_run_parts(folder))
    return Mismatch.from_result(document, time.perf_counter() - started_at)


async def _run_parts(folder: Path) -> dict[str, Any]:
    await run_part("mismatch-engine", folder, DEADLINE_S["mismatch-engine"])
    return await run_part("mismatch-trainer", folder, DEADLINE_S["mismatch-trainer"])


def _build_request(recipe: Recipe, scratch: Path) -> Request:
    run = recipe.run_path.absolute()
    model_parent = run if recipe.model.randomly_initialized and (run / "model").is_dir() else scratch
    model = open_model(recipe, model_parent)
    tokenizer = open_tokenizer(recipe, model, model_parent)
    check_fits_model(tokenizer, model.shape.vocab)
    problems = first_problems(recipe.data, recipe.seed, recipe.evaluation, 1, recipe.rollout).get("train")
    if not problems:
        raise UserError("data: has no training problem on this machine for the prompt; download the data set, or name a file")
    prompt = encode_prompt(tokenizer, problems[0], recipe.data)
    context = recipe.rollout.context or model.shape.max_positions
    prompt = prompt[: context // 2]
    tokens = min(RESPONSE_TOKENS, recipe.rollout.max_tokens or context, context - len(prompt))
    return Request(recipe.model_dump_json(by_alias=True), str(model.path), prompt, tokens, recipe.device)
