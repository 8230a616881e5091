"""A real engine and the trainer in bf16, with the operations that CUDA has, in Triton's interpreter on a CPU.

`test_bitwise.py` runs this file in a separate process with `TRITON_INTERPRET=1`. It shows that both round at the same positions; whether a
GPU's kernels are independent of other rows, only a GPU shows.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from mtpctl.compat import cpu_device
from mtpctl.convert.hf_folder import HfFolder
from mtpctl.kernels import exact, exact_delta, exact_experts, invariant, qkv
from mtpctl.kernels.invariant import PagedKV
from mtpctl.kernels.rows import row_sums_triton
from mtpctl.model import attention, experts
from mtpctl.model.core_attention import PackedAttention
from mtpctl.recipe.rollout import SpeculationConfig, VllmConfig
from mtpctl.rollout.vllm.engine import VllmEngine
from mtpctl.rollout.vllm.patches import NUMERICS
from mtpctl.rollout.vllm.patches.exact import exact_attention_class
from mtpctl.rollout.vllm.patches.invariant import replace_operations
from mtpctl.rollout.vllm.plugin import install
from mtpctl.rollout.vllm.settings import build_engine_settings
from mtpctl.samples import GenerationRequest, Sample, ids_of
from mtpctl.trainer.batch import Sequence
from tests.fakes import tiny
from tests.fakes.bitwise import FAMILIES, folder_of

OPERATIONS = ("linear", "logits", "rms_norm", "swiglu", "rotate", "log_mass", "log_softmax")


def dot(self: object, a: Any, b: Any, total: Any, *_: object) -> Any:
    """A product of tiles. The interpreter stores bf16 as integers, and multiplies these."""
    product = _values(a) @ _values(b)  # in float64, so that the order of additions does not matter
    return interpreter.TensorHandle(product.astype(np.float32) + total.data, total.dtype.scalar)


def _values(x: Any) -> np.ndarray:
    is_bf16 = x.dtype.scalar == tl.bfloat16
    return ((x.data.astype(np.uint32) << 16).view(np.float32) if is_bf16 else x.data).astype(np.float64)


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU backend of vLLM and the trainer call what they call on CUDA."""
    cpu_device.install()
    torch.set_num_threads(1)
    monkeypatch.setenv(NUMERICS, "bitwise")
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(invariant, "HALF_DTYPES", (*invariant.HALF_DTYPES, torch.float32))  # `dot` has no TF32
    for name in OPERATIONS:
        monkeypatch.setattr(exact, name, getattr(invariant, name))
    for name in ("chosen_probs", "grouped_linear"):
        monkeypatch.setattr(exact_experts, name, getattr(exact_experts, f"{name}_triton"))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)  # vLLM would pack the weights of convolutions
    for name in ("convolve", "recur"):
        monkeypatch.setattr(exact_delta, f"{name}_torch", getattr(exact_delta, f"{name}_triton"))
    monkeypatch.setattr(experts, "exact_product", exact_experts.grouped_linear_triton)
    for module in (exact_experts, experts):
        monkeypatch.setattr(module, "row_sums", row_sums_triton)

    def split_heads(mixed: torch.Tensor, *arguments: Any) -> qkv.Heads:
        return qkv.Heads(*qkv.split_heads_triton(mixed.contiguous(), *arguments))

    def attend(self: PackedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return self._flash(q, k, v, *arguments).reshape(len(q), 1, -1)

    monkeypatch.setattr(attention, "split_heads", split_heads)
    monkeypatch.setattr(PackedAttention, "attend", attend)
    install()
    replace_operations()
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    class PagedAttention(exact_attention_class()):  # type: ignore[misc]
        def forward(
            self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, output: Any, *_: Any, **__: Any
        ) -> Any:
            if metadata is not None:
                starts = metadata.query_start_loc.int()
                count, longest = int(starts[-1]), int(starts.diff().max())
                keys, values = kv_cache.split(self.head_size, -1)
                pages = PagedKV(keys, values, metadata.block_table.int(), metadata.seq_lens.int())
                invariant.paged_attention(query[:count], pages, starts, longest, self.scale, output[:count])
            return output

    monkeypatch.setattr(CPUAttentionBackend, "get_impl_cls", staticmethod(lambda: PagedAttention))


async def respond(folder: HfFolder, k: int) -> list[Sample]:
    rollout = VllmConfig(
        max_in_flight=4,
        context=256,
        threads=1,
        kv_cache_bytes=8 << 20,
        speculation=SpeculationConfig(num_tokens=k),
        engine_args={"block_size": 32, "enable_prefix_caching": folder.shape.delta is None, "max_num_batched_tokens": 48},
    )
    engine = await VllmEngine.start(
        build_engine_settings(rollout, model=str(folder.path), precision="bf16", device="cpu", numerics="bitwise")
    )
    draw = random.Random(0)
    prompts = [ids_of([draw.randrange(60) for _ in range(count)]) for count in (1, 3, 64, 70, 33, 130)]
    try:
        return await asyncio.gather(
            *(engine.generate(GenerationRequest(Sample("p", "g", prompt), 8, temperature=1.0)) for prompt in prompts)
        )
    finally:
        await engine.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_the_trainers(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path / "model")
    samples = asyncio.run(respond(folder, 3 if folder.shape.mtp_layers else 0))
    inputs = [Sequence(list(sample.token_ids), len(sample.prompt_ids), list(sample.loss_mask)) for sample in samples]
    behaviour = np.concatenate([np.asarray(sample.behaviour_logprobs, np.float32) for sample in samples])
    own = {}
    for precision in ("bf16", "fp32"):
        with tiny.engine(folder, numerics="bitwise", precision=precision, tokens_per_microbatch=400) as trainer:
            own[precision] = np.concatenate([np.asarray(score.logprobs, np.float32) for score in trainer.score(inputs)])
    assert len(behaviour) == 48
    assert np.array_equal(own["bf16"], behaviour)
    assert np.abs(own["fp32"] - behaviour).max() > 1e-3, "bf16 rounds"
