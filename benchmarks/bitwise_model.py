"""Processes of `bitwise_gpu.py`: a model's folder, an engine's responses, their scores, the trainer's speed, and the first difference.

    python benchmarks/bitwise_model.py folder --folder /tmp/small
    python benchmarks/bitwise_model.py engine --folder /tmp/small --drafts 3 --out /tmp/responses.json
    python benchmarks/bitwise_model.py score --folder /tmp/small --samples /tmp/responses.json --out /tmp/differences.json
    python benchmarks/bitwise_model.py trainer --folder /tmp/small --out /tmp/milliseconds.json
    python benchmarks/bitwise_model.py mismatch --folder /tmp/small --out /tmp

`--device cpu` uses a toy model in fp32. `--size large` has the widths of a published model of the family.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1408,
    "vocab_size": 8192,
    "rope_theta": 640000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
TOY = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 112,
    "vocab_size": 512,
    "moe_intermediate_size": 48,
}
QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 28,  # of 36, so that the trainer with a drafter has room
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mimo": {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "attention_bias": True, "num_nextn_predict_layers": 1},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 192,
        "norm_topk_prob": True,
    },
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "partial_rotary_factor": 0.25,
        "mtp_num_hidden_layers": 1,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
}
"""Config fields of each family. Those without an MTP head get an EAGLE-3 drafter."""
QWEN3_5_9B = QWEN3_8B | {
    "num_hidden_layers": 20,  # of 32, so that the trainer has room
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 248320,
    "rope_theta": 1e7,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": 5 * ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
TOY_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
PRIOR_STD = 3.0
"""Standard deviation of tokens' mean logits in models with an EAGLE-3 drafter, in nats."""
PRIOR_EMBEDDING = 8.0
"""First dimension of all embeddings in these models; the others are about 1."""


def report(text: str) -> None:
    print(text, flush=True)


def make_config(family: str, size: str, device: str) -> dict[str, Any]:
    """A model's config. Responses have their full length, because no token ends them."""
    from mtpctl.bench.train_step import load_named_config

    config = SMALL | FAMILIES[family]
    if device == "cpu":
        config |= TOY | (TOY_DELTA if family == "qwen3.5" else {})
    elif size == "large":
        if family == "mimo":
            config = dict(load_named_config(""))
        elif family == "qwen3.5":
            config |= QWEN3_5_9B
        elif family == "qwen3-moe":  # 12 of 48 layers, to fit one GPU
            config = config | dict(load_named_config("Qwen/Qwen3-30B-A3B")) | {"num_hidden_layers": 12}
        else:
            config |= QWEN3_8B
    for name in ("bos_token_id", "eos_token_id", *([] if family == "qwen3-moe" else ["moe_intermediate_size"])):
        config.pop(name, None)
    if family in ("mimo", "qwen3.5"):
        return config
    shared = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "rms_norm_eps")
    layers = config["num_hidden_layers"]
    drafter = {name: config[name] for name in (*shared, "rope_theta", "rope_scaling", "max_position_embeddings") if name in config} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": config["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [1, layers // 2, layers],
    }
    return config | {"drafter": drafter}


def create_folder(options: argparse.Namespace) -> None:
    """A model with random weights, norms and biases, whose logits spread by several nats.

    Some drafts are accepted: the next token mostly depends on the last one, whose embedding an MTP head reads. An EAGLE-3 drafter reads
    the embedding in its attention only, so these models' first hidden dimension is large, and adds to each token's logit its mean.
    """
    import torch
    from safetensors.torch import save_file

    from mtpctl.convert.hf_folder import split_drafter, write_config
    from mtpctl.families.reading import DRAFTER, shape_of
    from mtpctl.families.tensors import tensor_shapes

    config = make_config(options.family, options.size, options.device)
    has_prior = "drafter" in config
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    generator = torch.Generator(options.device).manual_seed(0)
    options.folder.mkdir(parents=True)
    tensors = {}
    shape = shape_of(config)
    for name, size in tensor_shapes(shape).items():
        values = torch.randn(size, generator=generator, device=options.device)
        if len(size) == 1:
            is_centered = shape.delta is not None and not name.endswith("linear_attn.norm.weight")
            values = 0.2 * values + (0.0 if is_centered or name.endswith("bias") else 1.0)
        elif name.endswith("input_proj.weight"):
            values = torch.eye(size[0], device=options.device).repeat(1, 2)
            values[:, : size[0]] = 0.0
        elif name == "mtp.fc.weight":
            values = torch.eye(*size, device=options.device)
        elif name.endswith("conv1d.weight"):
            values *= size[-1] ** -0.5
        elif name.endswith("fc.weight"):  # of an EAGLE-3 drafter: the state after the last layer
            values = torch.eye(size[0], device=options.device).repeat(1, 3)
            values[:, : 2 * size[0]] = 0.0
        elif "embed_tokens" not in name:
            values *= size[1] ** -0.5
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            values *= 0.6 * config["num_hidden_layers"] ** -0.5
        elif "lm_head" in name:
            values *= 3.0
        if has_prior and "embed_tokens" in name:
            values[:, 0] = PRIOR_EMBEDDING
        elif has_prior and "lm_head" in name:
            values[:, 0] = PRIOR_STD / PRIOR_EMBEDDING * torch.randn(size[0], generator=generator, device=options.device)
        tensors[name] = values.to(dtype).cpu()
    target, drafter = split_drafter(tensors)
    save_file(target, options.folder / "model.safetensors", metadata={"format": "pt"})
    if drafter:
        (options.folder / DRAFTER).mkdir()
        save_file(drafter, options.folder / DRAFTER / "model.safetensors", metadata={"format": "pt"})
    write_config(config | {"torch_dtype": str(dtype).removeprefix("torch.")}, options.folder)


def run_engine(options: argparse.Namespace) -> None:
    """Generate responses and write them to `--out`. Prints tokens per second."""
    if options.device == "cpu":
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    samples, seconds, start_s = asyncio.run(_generate(options))
    tokens = sum(len(sample.response_ids) for sample in samples)
    drafted, accepted = (sum(getattr(sample.speculation, name) for sample in samples) for name in ("drafted", "accepted"))
    cached = sum(sample.cached_tokens or 0 for sample in samples)
    options.out.write_text(json.dumps({"samples": [sample.to_dict() for sample in samples], "tokens_per_s": tokens / seconds}))
    report(
        f"  {options.size}, {options.numerics}, {'eager' if options.eager else f'graphs: {options.graphs}'}, {options.drafts} drafts: "
        f"{len(samples)} responses, {tokens} tokens, {tokens / seconds:.0f} tokens/s; {accepted} of {drafted} drafts accepted, "
        f"{cached} prompt tokens cached; engine started in {start_s:.0f} s"
    )


async def _generate(options: argparse.Namespace) -> tuple[list[Any], float, float]:
    from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
    from mtpctl.rollout.vllm.engine import VllmEngine
    from mtpctl.rollout.vllm.settings import build_engine_settings
    from mtpctl.samples import GenerationRequest, Sample, ids_of

    cuda, is_large = options.device == "cuda", options.size == "large"
    # Several engines share the GPU: they must not measure its free memory.
    fields: dict[str, Any] = {"threads": 1, "kv_cache_bytes": 48 << 20} if not cuda else {"gpu_memory": 0.3, "kv_cache_bytes": 12 << 30}
    if cuda and not is_large:
        fields = {"gpu_memory": 0.1, "kv_cache_bytes": (1024 if options.family == "qwen3.5" else 256) << 20}
    rollout = VllmConfig(
        max_in_flight=options.flight,
        context=1024,
        eager=bool(options.eager),
        speculation=SpeculationConfig(num_tokens=options.drafts, draft_method=options.method if options.drafts else "greedy"),
        # Prompts of the small model take several steps, in which other requests decode.
        engine_args={"enable_prefix_caching": cuda or options.family != "qwen3.5" or not options.drafts}
        | ({} if is_large else {"max_num_batched_tokens": 256}),
        **fields,
    )
    settings = build_engine_settings(
        rollout, model=str(options.folder), precision="bf16" if cuda else "fp32", device=options.device, numerics=options.numerics
    )
    if options.graphs == "decode" and options.numerics == "bitwise" and cuda:
        del settings.environment["VLLM_USE_BREAKABLE_CUDAGRAPH"]
        settings.args["compilation_config"]["cudagraph_mode"] = "FULL_DECODE_ONLY"
    draw = random.Random(options.drafts)
    vocab = 500 if not cuda else 8000
    shared_prefix = [draw.randrange(vocab) for _ in range(150)]
    lengths = [256] if is_large else [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 400]
    prompts = []
    for index in range(options.responses):
        unique_tokens = [draw.randrange(vocab) for _ in range(lengths[index % len(lengths)])]
        prompts.append(unique_tokens if is_large or index % 2 else shared_prefix + unique_tokens)
    while not (options.folder / "config.json").exists():  # written last
        await asyncio.sleep(0.1)
    began = time.monotonic()
    engine = await VllmEngine.start(settings)
    started = time.monotonic() - began
    slots = asyncio.Semaphore(options.flight)

    async def respond(index: int, tokens: int) -> Sample:
        async with slots:
            return await engine.generate(GenerationRequest(Sample(f"p{index}", "g", ids_of(prompts[index])), tokens, temperature=1.0))

    try:
        await asyncio.gather(*(respond(index, 8) for index in range(min(options.responses, options.flight))))  # warm-up
        while options.go and not options.go.exists():
            await asyncio.sleep(0.1)
        began = time.monotonic()
        samples = await asyncio.gather(*(respond(index, options.tokens) for index in range(options.responses)))
        return samples, time.monotonic() - began, started
    finally:
        await engine.shutdown()


def _start_trainer(options: argparse.Namespace, numerics: str, **fields: Any) -> Any:
    from harness import parser  # noqa: F401  installs stand-ins for CUDA calls before Megatron is imported
    from mtpctl.convert.hf_folder import HfFolder
    from mtpctl.recipe.section import ParallelConfig
    from mtpctl.trainer.config import EngineConfig
    from mtpctl.trainer.engine import MegatronEngine

    precision = "bf16" if options.device == "cuda" else "fp32"
    config = EngineConfig(ParallelConfig(), precision, numerics=numerics, tokens_per_microbatch=8192, **fields)  # type: ignore[arg-type]
    return MegatronEngine(HfFolder.open(options.folder), config)


def run_score(options: argparse.Namespace) -> None:
    """Compare the log-probs of `--samples` with the trainer's in both modes, and write the largest differences with `bitwise`."""
    import numpy as np

    from mtpctl.samples import Sample
    from mtpctl.trainer.batch import Sequence

    largest_errors: dict[str, float] = {}
    for numerics in ("bitwise",) if options.size == "large" else ("bitwise", "default"):
        trainer = _start_trainer(options, numerics, train=False)
        try:
            for file in options.samples.split(","):
                samples = [Sample.from_dict(each) for each in json.loads(Path(file).read_text())["samples"]]
                inputs = [Sequence(list(sample.token_ids), len(sample.prompt_ids), list(sample.loss_mask)) for sample in samples]
                began = time.monotonic()
                scores = trainer.score(inputs)
                seconds = time.monotonic() - began
                trainer_logprobs = np.concatenate([np.asarray(score.logprobs, np.float32) for score in scores])
                behaviour = np.concatenate([np.asarray(sample.behaviour_logprobs, np.float32) for sample in samples])
                errors = np.abs(trainer_logprobs - behaviour)
                report(
                    f"  {Path(file).stem}, trainer {numerics}: {int((errors != 0).sum())} of {len(errors)} log-probs differ, at most "
                    f"{errors.max():.3g}, {errors.mean():.3g} on average; log-prob {behaviour.mean():.2f} on average, "
                    f"{sum(len(each.token_ids) for each in inputs) / seconds:.0f} tokens/s scored"
                )
                if numerics == "bitwise":
                    largest_errors[file] = float(errors.max()) if np.isfinite(errors).all() else float("inf")
                    _locate(samples, trainer_logprobs != behaviour)
        finally:
            trainer.close()
    options.out.write_text(json.dumps(largest_errors))


def _locate(samples: list[Any], is_different: Any) -> None:
    """Print where log-probs differ: a pattern in positions points to an operation that depends on the shape of a step."""
    if not is_different.any():
        return
    positions, start = [], 0
    for sample in samples:
        prompt, count = len(sample.prompt_ids), len(sample.response_ids)
        positions += [(index, prompt + index) for index in range(count) if is_different[start + index]]
        start += count
    first = sum(index == 0 for index, _ in positions)
    report(
        f"    of these, {first} are first tokens (computed in prefill); contexts from {min(context for _, context in positions)} to "
        f"{max(context for _, context in positions)}; in {sum(1 for index, _ in positions if index > 0)} decoded positions"
    )


def run_trainer(options: argparse.Namespace) -> None:
    """Time of a forward and backward pass of 8,192 packed tokens, written to `--out` in milliseconds."""
    from harness import parser  # noqa: F401
    from mtpctl.bench.train_step import make_samples, synchronize
    from mtpctl.trainer.objective import NextToken

    trainer = _start_trainer(options, options.numerics, random_seed=0)
    try:
        batch, times, losses = make_samples(trainer.folder.shape.vocab, 8192, 10, 0.33), [], []
        for _ in range(6):
            synchronize(trainer.device)
            began = time.perf_counter()
            losses.append(trainer.forward_backward(batch, NextToken())["sft/loss"])
            synchronize(trainer.device)
            times.append(1000 * (time.perf_counter() - began))
    finally:
        trainer.close()
    median = statistics.median(times[2:])
    options.out.write_text(json.dumps({"milliseconds": median}))
    report(f"  trainer, {options.numerics}: forward and backward {median:.0f} ms for 8,192 tokens, loss {losses[-1]:.6f}")


def run_mismatch(options: argparse.Namespace) -> None:
    """`mtpctl doctor --mismatch` for the small model."""
    from mtpctl.doctor.mismatch import examine_mismatch
    from mtpctl.recipe.loading import load_recipe

    cuda = options.device == "cuda"
    sets = [
        "model.init=weights",
        "model.config=null",
        f"model.path={options.folder}",
        f"run_dir={options.out / 'run'}",
        "rollout.speculation.num_tokens=1",
    ]
    sets += ["rollout.eager=true", "numerics=bitwise", "mtp.mode=isolated", "rollout.max_tokens=96"]
    if cuda:
        sets += ["cluster.device=cuda", "sync.transport=nccl", "train.precision=bf16", "rollout.gpu_memory=0.3"]
    recipe = load_recipe("tiny_mtp", sets=sets).recipe
    file = options.out / "recipe.yaml"
    file.write_text(recipe.model_dump_json(by_alias=True, exclude_unset=True))  # JSON is YAML
    result = examine_mismatch(str(file))
    for module in result.modules:
        report(
            f"  {result.label(module.name):28} same inputs: mean {module.mean:.1e}, worst {module.worst:.1e}; "
            f"own inputs: {module.total:.1e}; prefill against decoding: {module.prefill:.1e}"
        )
    for line in result.logprobs:
        report(f"  {line.source:28} log-probs: mean {line.mean:.1e}, largest {line.largest:.1e}")
    report(f"  verdict: {result.verdict}")


PARTS = {"folder": create_folder, "engine": run_engine, "score": run_score, "trainer": run_trainer, "mismatch": run_mismatch}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("part", choices=tuple(PARTS))
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--family", choices=tuple(FAMILIES), default="mimo")
    arguments.add_argument("--size", choices=("small", "large"), default="small")
    arguments.add_argument("--numerics", choices=("bitwise", "default"), default="bitwise")
    arguments.add_argument("--folder", type=Path, required=True, help="the model's folder")
    arguments.add_argument("--out", type=Path, default=Path("out.json"), help="file of results; folder of `mismatch`")
    arguments.add_argument("--samples", default="", help="files of `engine`, separated by commas")
    arguments.add_argument("--drafts", type=int, default=0, help="draft tokens per step")
    arguments.add_argument("--method", choices=("greedy", "probabilistic"), default="greedy", help="how drafts are selected")
    arguments.add_argument("--eager", type=int, default=0, help="1: without CUDA graphs")
    arguments.add_argument("--graphs", choices=("all", "decode"), default="all", help="decode: steps with prefill run eagerly")
    arguments.add_argument("--responses", type=int, default=48)
    arguments.add_argument("--tokens", type=int, default=96, help="tokens of a response")
    arguments.add_argument("--go", type=Path, default=None, help="file whose existence the engine awaits before it generates")
    arguments.add_argument("--flight", type=int, default=24, help="requests in flight")
    options = arguments.parse_args()
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
