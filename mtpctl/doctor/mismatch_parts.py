"""The two processes of `mtpctl doctor --mismatch`: `generate` runs the engine, `score` the trainer and the log-prob server.

They share a folder with `mismatch.json` (a `Request`), the recorded samples, and the outputs of the engine's layers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mtpctl.recipe.rollout import VllmConfig
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.section import ParallelConfig
from mtpctl.routes import RouteShape
from mtpctl.samples import GenerationRequest, Logprobs, Sample, ids_of

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from mtpctl.model.gpt import MtpModel
    from mtpctl.rollout.vllm.engine import VllmEngine

LIMIT_FACTOR = 4.0
"""The limit of a module's mean difference, as a multiple of rounding error."""
WORST_FACTOR = 8.0
"""The limit of a single token's difference, as a multiple of the limit of the mean difference."""
REQUEST_FILE = "mismatch.json"
COMPILED = "with CUDA graphs"
"""Name of the sample of an engine that runs as the recipe configures it, with compilation and CUDA graphs."""


@dataclass(frozen=True, slots=True)
class Request:
    """The recipe as JSON, the model's folder, the prompt's token ids, the response's length, and the device."""

    recipe: str
    model: str
    prompt: list[int]
    tokens: int
    device: Literal["cpu", "cuda"]

    @classmethod
    def read(cls, folder: Path) -> Request:
        return cls(**json.loads((folder / REQUEST_FILE).read_text()))

    def write(self, folder: Path) -> None:
        (folder / REQUEST_FILE).write_text(json.dumps(asdict(self)))


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """Differences between engine and trainer in the output of one module, relative to the engine's output of the same token.

    mean, worst: over tokens, in a trainer pass whose modules read the engine's inputs. total: the mean in a pass on the trainer's own
    inputs, which includes the differences of all earlier modules. prefill: the mean difference between the engine's outputs in prefill and
    in decoding.
    """

    name: str
    mean: float
    worst: float
    total: float
    prefill: float

    def exceeds(self, limit: float) -> bool:
        """Whether rounding does not explain the difference. True for NaN."""
        return not (self.mean <= limit and self.worst <= WORST_FACTOR * limit)


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """Differences in nats between the trainer's log-probs of the sampled tokens and those of `source`."""

    source: str
    mean: float
    largest: float


# --------------------------------------------------------------------------------------------------------------- engine


def generate(folder: Path) -> dict[str, object]:
    """Generate the response in eager mode, recording decoding and a prefill of the same tokens. Returns counts of tokens and drafts.

    An engine with CUDA graphs is also run as the recipe configures it. Its layers cannot be recorded, only its log-probs.
    """
    request = Request.read(folder)
    rollout = Recipe.model_validate_json(request.recipe).rollout
    assert isinstance(rollout, VllmConfig)
    sample = asyncio.run(_generate_eager(request, folder))
    samples = {"eager": sample.to_dict()}
    if request.device == "cuda" and not rollout.eager:
        samples[COMPILED] = asyncio.run(_generate_compiled(request)).to_dict()
    (folder / "samples.json").write_text(json.dumps(samples))
    return {"tokens": len(sample.response_ids), "drafted": sample.speculation.drafted, "accepted": sample.speculation.accepted}


async def _start(request: Request, *, eager: bool) -> VllmEngine:
    from mtpctl.convert.hf_folder import HfFolder
    from mtpctl.rollout.vllm.engine import VllmEngine
    from mtpctl.rollout.vllm.settings import build_engine_settings

    recipe = Recipe.model_validate_json(request.recipe)
    rollout, shape = recipe.rollout, HfFolder.open(request.model).shape
    assert isinstance(rollout, VllmConfig)
    routes = RouteShape.of(shape) if recipe.replay(shape) == "rollout" else None
    # On a GPU, bitwise log-probs require the same tensor-parallel size, and this trainer runs on one rank.
    ranks = 1 if recipe.numerics == "bitwise" and request.device == "cuda" else rollout.tp
    settings = build_engine_settings(
        rollout.model_copy(update={"eager": eager, "context": rollout.context or shape.max_positions, "tp": ranks}),
        model=request.model,
        precision=recipe.train.precision,
        device=request.device,
        seed=recipe.seed,
        routes=routes.layers if routes else (),
        immediate_admission=True,
        numerics=recipe.numerics,
    )
    return await VllmEngine.start(settings)


def _generation_request(request: Request) -> GenerationRequest:
    recipe = Recipe.model_validate_json(request.recipe)
    sample = Sample("prompt", "prompt", ids_of(request.prompt))
    return GenerationRequest(sample, max_tokens=request.tokens, temperature=recipe.rollout.temperature, seed=recipe.seed)


async def _generate_eager(request: Request, folder: Path) -> Sample:
    from mtpctl.rollout.vllm.client import VllmClient

    engine = await _start(request, eager=True)
    try:
        client, generation_request = VllmClient(engine._llm), _generation_request(request)
        max_tokens = str(len(request.prompt) + request.tokens + 64)  # Drafts reach beyond the last token.
        await client.rpc("mtpctl_capture", max_tokens)
        sample = await engine.generate(generation_request)
        tokens = list(sample.token_ids)
        arguments = json.dumps(tokens), str(generation_request.temperature)
        await client.rpc("mtpctl_write_capture", str(folder / "decode.safetensors"), *arguments)
        await engine._llm.reset_prefix_cache()
        await client.rpc("mtpctl_capture", max_tokens)
        await engine.generate(GenerationRequest(Sample("prefill", "prefill", ids_of(tokens[:-1])), max_tokens=1, temperature=1.0))
        await client.rpc("mtpctl_write_capture", str(folder / "prefill.safetensors"), *arguments)
        return sample
    finally:
        await engine.shutdown()


async def _generate_compiled(request: Request) -> Sample:
    engine = await _start(request, eager=False)
    try:
        return await engine.generate(_generation_request(request))
    finally:
        await engine.shutdown()


# -------------------------------------------------------------------------------------------------------------- trainer


def score(folder: Path) -> dict[str, Any]:
    """Run the recorded response through the trainer and the log-prob server. Returns the differences and the limit of rounding."""
    from safetensors.torch import load_file

    request = Request.read(folder)
    recipe = Recipe.model_validate_json(request.recipe)
    samples = {name: Sample.from_dict(fields) for name, fields in json.loads((folder / "samples.json").read_text()).items()}
    sample = samples["eager"]
    decode, prefill = (load_file(folder / f"{name}.safetensors") for name in ("decode", "prefill"))
    trainer_outputs = _run_trainer(request, recipe, samples, decode)
    first_row = len(sample.prompt_ids) - 1  # predicts the first response token
    reference, behaviour = trainer_outputs["logprobs"]["eager"], sample.behaviour_logprobs
    differences = [
        _logprob_difference("engine, decode", behaviour, reference),
        _logprob_difference("engine, prefill", prefill["logprob"][first_row:].tolist(), reference),
        _logprob_difference("log-prob server", _score_on_server(request, recipe, sample), reference),
    ]
    if COMPILED in samples:
        differences.insert(
            1,
            _logprob_difference(f"engine, decode {COMPILED}", samples[COMPILED].behaviour_logprobs, trainer_outputs["logprobs"][COMPILED]),
        )
    modules = [
        ModuleDifference(
            name,
            *_relative_difference(trainer_outputs["on_engine_inputs"][name], decode[name]),
            total=_relative_difference(trainer_outputs["on_own_inputs"][name], decode[name])[0],
            prefill=_relative_difference(prefill[name], decode[name])[0],
        )
        for name in trainer_outputs["on_engine_inputs"]
    ]
    modules.append(_compare_head(trainer_outputs, decode, prefill, behaviour, first_row))
    return {
        "modules": [asdict(module) for module in modules],
        "logprobs": [asdict(difference) for difference in differences],
        "limit": 0.0 if recipe.numerics == "bitwise" else LIMIT_FACTOR * trainer_outputs["rounding"],
        "bitwise": recipe.numerics == "bitwise",
        "precision": recipe.train.precision,
        "moe_layers": trainer_outputs["moe_layers"],
    }


def _run_trainer(request: Request, recipe: Recipe, samples: dict[str, Sample], decode: dict[str, Tensor]) -> dict[str, Any]:
    """Log-probs of all samples, and the modules' outputs: `on_own_inputs` of the trainer, and `on_engine_inputs`."""
    import torch

    from mtpctl.convert.hf_folder import HfFolder
    from mtpctl.trainer.batch import Sequence
    from mtpctl.trainer.config import EngineConfig
    from mtpctl.trainer.engine import MegatronEngine

    train = recipe.train
    config = EngineConfig(
        ParallelConfig(),
        train.precision,
        recipe.mtp,
        recipe.kernels,
        train.tokens_per_microbatch,
        lora=train.lora,
        moe=train.moe,
        numerics=recipe.numerics,
    )
    engine = MegatronEngine(HfFolder.open(request.model), config)
    replays = recipe.replay(engine.folder.shape) == "rollout"

    def logprobs(sample: Sample) -> Logprobs:
        sequence = Sequence(sample.token_ids, len(sample.prompt_ids), sample.loss_mask, routes=sample.routes if replays else None)
        return engine.score([sequence], temperature=recipe.rollout.temperature)[0].logprobs

    try:
        engine_inputs = {name: rows for name, rows in decode.items() if name.endswith(".stream") or name == "final_norm"}
        with capture_outputs(engine.module) as on_own_inputs:
            scored = {"eager": logprobs(samples["eager"])}
        with capture_outputs(engine.module, engine_inputs) as on_engine_inputs:
            logprobs_on_engine_inputs = logprobs(samples["eager"])
        scored |= {name: logprobs(sample) for name, sample in samples.items() if name != "eager"}
        width = max(engine.transformer.hidden_size, engine.transformer.ffn_hidden_size)
        # Outputs are rounded to the model's precision; sums over the width have fp32 rounding errors.
        rounding = torch.finfo(engine.transformer.params_dtype).eps + torch.finfo(torch.float32).eps * width**0.5
        layers = [layer.layer_number - 1 for layer in engine.module.decoder.layers if layer.is_moe_layer]
        return {
            "logprobs": scored,
            "on_own_inputs": on_own_inputs,
            "on_engine_inputs": on_engine_inputs,
            "logprobs_on_engine_inputs": logprobs_on_engine_inputs,
            "rounding": rounding,
            "moe_layers": layers,
        }
    finally:
        engine.close()


@contextmanager
def capture_outputs(model: MtpModel, inputs: Mapping[str, Tensor] | None = None) -> Iterator[dict[str, Tensor]]:
    """Record the outputs of the modules in a forward pass within the block, under the names of `mtpctl.rollout.vllm.receiver`.

    inputs: the engine's residual streams and final norm output for the sequence's first tokens. They replace those of `model`, so that
    every module reads the same input as in the engine.
    """
    capture = _Capture(inputs or {})
    try:
        capture.install(model)
        yield capture.rows
    finally:
        for handle in capture.handles:
            handle.remove()


class _Capture:
    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self.inputs = inputs
        self.rows: dict[str, Tensor] = {}
        self.handles: list[RemovableHandle] = []

    def install(self, model: MtpModel) -> None:
        for layer in model.decoder.layers:
            number = layer.layer_number - 1
            self.handles.append(layer.register_forward_pre_hook(self._layer_hook(number), with_kwargs=True))
            self._record_norm(f"{number}.norm1", layer.input_layernorm, layer.self_attention)
            self._record_output(f"{number}.attention", layer.self_attention)
            self.handles.append(layer.pre_mlp_layernorm.register_forward_pre_hook(self._input_hook(f"{number}.norm2.stream")))
            self._record_norm(f"{number}.norm2", layer.pre_mlp_layernorm, layer.mlp)
            self._record_output(f"{number}.mlp", layer.mlp)
        final = model.decoder.final_layernorm
        self.handles.append(final.register_forward_pre_hook(self._input_hook("final_norm.stream")))
        self._record_output("final_norm", final)
        self.handles.append(final.register_forward_hook(lambda module, args, out: self._replace_rows("final_norm", out)))

    def _layer_hook(self, number: int) -> Any:
        def replace_stream(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            stream = args[0] if args else kwargs["hidden_states"]
            if number == 0:
                self._store("embedding", stream)
            stream = self._replace_rows(f"{number}.norm1.stream", stream)
            return (stream, *args[1:]) if args else (), kwargs if args else kwargs | {"hidden_states": stream}

        return replace_stream

    def _input_hook(self, name: str) -> Any:
        return lambda module, args: (self._replace_rows(name, args[0]), *args[1:])

    def _record_norm(self, name: str, norm: nn.Module, module: nn.Module) -> None:
        """Record a norm's output. Most layers fuse their norm with the linear layer that follows."""
        from megatron.core.transformer.identity_op import IdentityOp

        from mtpctl.model.layers import LayerNormColumnParallelLinear

        if not isinstance(norm, IdentityOp):
            self._record_output(name, norm)
            return
        linear = next(child for child in module.children() if isinstance(child, LayerNormColumnParallelLinear))
        self.handles.append(linear.register_forward_pre_hook(lambda fused, args: self._store(name, fused._norm(args[0]))))

    def _record_output(self, name: str, module: nn.Module) -> None:
        def store(_: nn.Module, args: tuple[Any, ...], out: Tensor | tuple[Tensor, Tensor | None]) -> None:
            if isinstance(out, tuple):
                out = out[0] if out[1] is None else out[0] + out[1]
            self._store(name, out)

        self.handles.append(module.register_forward_hook(store))

    def _store(self, name: str, rows: Tensor) -> None:
        self.rows[name] = rows.detach().flatten(0, -2).to("cpu", copy=True)

    def _replace_rows(self, name: str, rows: Tensor) -> Tensor:
        """Replace the first rows with the inputs of this name."""
        if name not in self.inputs:
            return rows
        inputs = self.inputs[name]
        replaced = rows.clone()
        replaced.view(-1, rows.shape[-1])[: len(inputs)] = inputs.to(rows)
        return replaced


def _score_on_server(request: Request, recipe: Recipe, sample: Sample) -> Logprobs:
    from mtpctl.logprob.protocol import ScoreRequest
    from mtpctl.logprob.rank import ReplicaConfig, ScoreRank

    options = recipe.logprob
    config = ReplicaConfig(
        request.model,
        ParallelConfig(),
        recipe.train.precision,
        recipe.mtp,
        recipe.kernels,
        options.tokens_per_batch,
        threads=1 if request.device == "cpu" else 0,
        numerics=recipe.numerics,
    )
    rank = ScoreRank(config, 0)
    rank.build("")
    try:
        routes = sample.routes if recipe.replay(rank.engine.folder.shape) == "rollout" else None
        score_request = ScoreRequest(sample.token_ids, len(sample.prompt_ids), temperature=recipe.rollout.temperature, routes=routes)
        scores = rank.score([score_request], 0)
    finally:
        rank.engine.close()
    assert scores is not None
    return scores[0].logprobs


def _logprob_difference(source: str, values: Logprobs | list[float], reference: Logprobs) -> LogprobDifference:
    errors = [abs(a - b) for a, b in zip(values, reference, strict=True)]
    return LogprobDifference(source, sum(errors) / len(errors), max(errors))


def _relative_difference(rows: Tensor, reference: Tensor) -> tuple[float, float]:
    """Mean and maximum over tokens of |difference| / |reference|, where | | is the Euclidean norm of a token's row."""
    reference = reference.double()
    norms = reference.norm(dim=-1)
    # A token whose output nearly cancels has no meaningful relative error.
    floor = norms.median().clamp(min=1e-30) / 100
    errors = (rows[: len(reference)].double() - reference).norm(dim=-1) / norms.clamp(min=floor)
    return float(errors.mean()), float(errors.max())


def _compare_head(
    trainer_outputs: dict[str, Any], decode: dict[str, Tensor], prefill: dict[str, Tensor], behaviour: Logprobs, first_row: int
) -> ModuleDifference:
    """The LM head: differences of log-probs, relative to the token's largest logit."""
    import torch

    scale = decode["logit_scale"][first_row:].double()
    decoded = torch.tensor(list(behaviour), dtype=torch.float64)
    values = (trainer_outputs["logprobs_on_engine_inputs"], trainer_outputs["logprobs"]["eager"], prefill["logprob"][first_row:])
    on_engine_inputs, on_own_inputs, prefilled = (
        (torch.tensor(list(each), dtype=torch.float64) - decoded).abs() / scale for each in values
    )
    return ModuleDifference(
        "head", float(on_engine_inputs.mean()), float(on_engine_inputs.max()), float(on_own_inputs.mean()), float(prefilled.mean())
    )
