"""`engine_drafts` on a GPU, whose drafters are the second model runner's: `python -m tests.fakes.gpu_drafts FOLDER OUT.pt`.

vLLM runs in this process, in bf16, with mtpctl's patches and without CUDA graphs, for one request at a time.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from mtpctl.rollout.vllm.plugin import ENGINE_MARKER
from tests.fakes.engine_drafts import DRAFTS, PROMPT, Drafting


def record() -> list[Drafting]:
    """Every drafting of this process's engine from now on."""
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator

    result: list[Drafting] = []
    sample_draft = MultiModuleMTPSpeculator.sample_draft

    def recording(self: Any, states: torch.Tensor, positions: torch.Tensor, *args: Any, spec_step_idx: int = 0, **kwargs: Any) -> Any:
        if spec_step_idx == 0:
            token = self.input_buffers.input_ids[self.last_token_indices[0]]
            result.append(Drafting(int(positions[0]) - 1, int(token)))
        result[-1].logits.append(self.compute_draft_logits(states, spec_step_idx)[0].float().cpu())
        drafts = sample_draft(self, states, positions, *args, spec_step_idx=spec_step_idx, **kwargs)
        result[-1].drafts.append(int(drafts[0]))
        return drafts

    MultiModuleMTPSpeculator.sample_draft = recording
    return result


def main(folder: str, out: str) -> None:
    os.environ |= {ENGINE_MARKER: "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    from vllm import LLM, SamplingParams

    speculation: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": DRAFTS, "draft_sample_method": "greedy"}
    memory: dict[str, Any] = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30, "enable_prefix_caching": False}
    llm = LLM(
        folder,
        dtype="bfloat16",
        enforce_eager=True,
        max_num_seqs=4,
        max_model_len=128,
        skip_tokenizer_init=True,
        speculative_config=speculation,
        **memory,
    )
    draftings = record()
    settings = SamplingParams(temperature=1.0, seed=1, max_tokens=24, ignore_eos=True, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": list(PROMPT)}], settings)
    ids = [*PROMPT, *answer.outputs[0].token_ids]
    # A step that is launched ahead may draft behind the last token.
    whole = [each for each in draftings if len(PROMPT) - 1 <= each.position < len(ids) - 1]
    torch.save({"ids": ids, "draftings": [vars(each) for each in whole]}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
