"""Compare the log-probs of a checkpoint's FP8 folder with those of its bf16 folder, in stock vLLM on one GPU.

Three folders of the same checkpoint are served: bf16, FP8, and bf16 with the dequantized FP8 weights. The difference between the last two
is due to FP8 activations and kernels. Without `--model`, random models with the shapes of MiMo-7B (with its MTP layer as drafter) and
Qwen3-30B-A3B are used, with few layers. Exit code 1: that difference exceeds twice the difference that quantized weights make.

    python benchmarks/fp8_folder.py
    python benchmarks/fp8_folder.py --model FOLDER      # a trained model
    python benchmarks/fp8_folder.py --toy               # on a CPU with AMX
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import parser, print_environment

SHAPES: dict[str, dict[str, Any]] = {
    "mimo": {
        # transformers has no `mimo`; vLLM chooses the model by its architecture.
        "model_type": "qwen2",
        "architectures": ["MiMoForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 640000,
        "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 1,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "rope_theta": 1000000,
    },
}
VOCAB = 32768
COMMON = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "hidden_act": "silu",
}
TOY = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384, "num_experts": 8}
TOY |= {"head_dim": 64, "moe_intermediate_size": 128}
TOY_ENGINE = {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}
SERVE = """
import json, sys
from vllm import LLM, SamplingParams
folder, drafts, options, prompts = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
spec = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}} if drafts else {}
llm = LLM(folder, dtype="bfloat16", max_model_len=1024, enable_prefix_caching=False, skip_tokenizer_init=True, **options, **spec)
settings = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0, detokenize=False)
outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], settings)
rows = [list(zip(output.prompt_token_ids, output.prompt_logprobs))[1:] for output in outputs]
print("result", json.dumps([[entry[token].logprob for token, entry in row] for row in rows]))
"""


def run_conversion(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "mtpctl", "convert-hf", *map(str, words), "--force"], check=True, stdout=sys.stderr)


def score_prompts(folder: Path, *, drafts: bool, options: dict[str, Any], prompts: list[list[int]]) -> list[float]:
    """Log-probs of the prompts' tokens, from vLLM in a separate process."""
    command = [sys.executable, "-c", SERVE, str(folder), json.dumps(drafts), json.dumps(options), json.dumps(prompts)]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"VLLM_PLUGINS": ""})
    (line,) = (line for line in process.stdout.splitlines() if line.startswith("result "))
    return [value for row in json.loads(line.removeprefix("result ")) for value in row]


def compare_logprobs(first: list[float], second: list[float]) -> tuple[float, float]:
    """Mean and largest absolute difference."""
    values = [abs(a - b) for a, b in zip(first, second, strict=True)]
    return sum(values) / len(values), max(values)


def measure_model(name: str, source: Path, work: Path, options: dict[str, Any], bound: float, tokens: int) -> bool:
    """Serve the three folders and print a row. Returns whether the difference is within the bound."""
    from mtpctl.convert.hf_folder import HfFolder

    shape = HfFolder.open(source).shape
    checkpoint, plain, fp8 = work / "checkpoint", work / "bf16", work / "fp8"
    run_conversion(source, checkpoint)
    run_conversion(checkpoint, plain, "--dtype", "bf16")
    run_conversion(checkpoint, fp8, "--dtype", "fp8", "--verify")
    run_conversion(fp8, work / "fp8-checkpoint")
    run_conversion(work / "fp8-checkpoint", work / "dequantized")
    prompts = [[(7919 * (i + 1) + 104729 * row) % min(shape.vocab, VOCAB) for i in range(tokens)] for row in range(8)]
    drafts = shape.mtp_layers > 0
    rows = [score_prompts(folder, drafts=drafts, options=options, prompts=prompts) for folder in (plain, fp8, work / "dequantized")]
    weight_difference, fp8_difference, activation_difference = (
        compare_logprobs(rows[0], rows[2]),
        compare_logprobs(rows[0], rows[1]),
        compare_logprobs(rows[1], rows[2]),
    )
    size = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9 for folder in (plain, fp8)]
    cells = [f"{mean:.4f} (max {largest:.3f})" for mean, largest in (fp8_difference, weight_difference, activation_difference)]
    print(f"| {name} | {size[0]:.2f} -> {size[1]:.2f} | {' | '.join(cells)} |", flush=True)
    return activation_difference[0] <= 2 * weight_difference[0] + bound


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, help="a folder to measure instead of random models")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--bound", type=float, default=0.01, help="nats that are allowed in addition")
    options.add_argument("--work", type=Path, help="where folders are written; default: a temporary directory")
    options.add_argument("--options", default='{"gpu_memory_utilization": 0.6, "enforce_eager": true}', help="engine arguments, as JSON")
    options.add_argument("--toy", action="store_true", help="narrow models, for a CPU")
    arguments = options.parse_args()
    from mtpctl.convert.hf_folder import create_hf_folder

    print_environment()
    print("| model | GB | FP8 - bf16 | dequantized - bf16 | FP8 - dequantized |\n|---|---|---|---|---|", flush=True)
    is_within_bound = True
    tokens = 32 if arguments.toy else 512
    engine = TOY_ENGINE if arguments.toy else json.loads(arguments.options)
    with tempfile.TemporaryDirectory(dir=arguments.work) as root:
        if arguments.model:
            return 0 if measure_model(arguments.model.name, arguments.model, Path(root), engine, arguments.bound, tokens) else 1
        import torch

        for name, fields in SHAPES.items():
            work = Path(root) / name
            work.mkdir()
            fields = fields | TOY if arguments.toy else fields
            create_hf_folder(COMMON | fields | {"num_hidden_layers": arguments.layers}, work / "hf", 0, dtype=torch.bfloat16)
            is_within_bound &= measure_model(name, work / "hf", work, engine, arguments.bound, tokens)
    return 0 if is_within_bound else 1


if __name__ == "__main__":
    sys.exit(main())
