"""vLLM's block verification under Triton's interpreter, against the rule of arXiv 2403.10444 in float64.

`test_verification.py` runs this file in a separate process, because the interpreter is selected at import.
"""

from __future__ import annotations

import importlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpctl.rollout.vllm.patches.verification import derive_step_seeds, verify_with_fresh_noise
from tests.fakes import interpreted_triton

REQUESTS, DRAFTS, VOCAB, TEMPERATURE = 24, 3, 7, 0.7


@triton.jit
def draw_kernel(out_ptr, seed_ptr, pos_ptr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    tl.store(out_ptr + row, tl.rand(tl.load(seed_ptr + row), tl.load(pos_ptr + row)))


def numbers(seeds: Tensor, positions: Tensor) -> Tensor:
    """The number that vLLM draws for each seed and position."""
    out = torch.empty(len(seeds))
    draw_kernel[(len(seeds),)](out, seeds, positions)
    return out


def accepted_by_the_rule(target: Tensor, draft: Tensor, tokens: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
    """The accepted drafts of each request, and which tokens [requests, V] may follow them.

    target [requests, drafts + 1, V], draft [requests, drafts, V]: distributions. tokens, chance [requests, drafts]: drafts and numbers.
    """
    lengths, possible = [], []
    for p, q, x, u in zip(target, draft, tokens, chance, strict=True):
        ratio = [1.0]
        for i in range(DRAFTS):
            ratio.append(min(ratio[-1] * float(p[i, x[i]] / q[i, x[i]]), 1.0))
        length = 0
        for i in range(1, DRAFTS + 1):
            limit = ratio[i]
            if i < DRAFTS:
                mass = float((ratio[i] * p[i] - q[i]).clamp(min=0).sum())
                limit = mass / (mass + 1 - ratio[i]) if mass + 1 - ratio[i] > 0 else 1.0
            if float(u[i - 1]) <= limit:
                length = i
        lengths.append(length)
        possible.append(p[length] > 0 if length == DRAFTS else ratio[length] * p[length] > q[length])
    return torch.tensor(lengths), torch.stack(possible)


def main() -> None:
    g = torch.Generator().manual_seed(0)
    interpreted_triton.install()
    rejection_sample = importlib.import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils").rejection_sample
    target_logits = 1.5 * torch.randn(REQUESTS, DRAFTS + 1, VOCAB, generator=g)
    draft_logits = target_logits[:, :DRAFTS] + 1.2 * torch.randn(REQUESTS, DRAFTS, VOCAB, generator=g)
    target, draft = ((logits.double() / TEMPERATURE).softmax(2) for logits in (target_logits, draft_logits))
    drafts = torch.multinomial(draft.flatten(0, 1), 1, generator=g).view(REQUESTS, DRAFTS)
    begins = torch.randint(100, (REQUESTS,), generator=g)
    positions = (begins[:, None] + torch.arange(DRAFTS + 1)).flatten()
    seeds, slots = torch.randint(1 << 40, (REQUESTS,), generator=g), torch.arange(REQUESTS, dtype=torch.int32)
    ends = torch.arange(0, REQUESTS * (DRAFTS + 1) + 1, DRAFTS + 1, dtype=torch.int32)
    arguments = (
        (target_logits / TEMPERATURE).flatten(0, 1).contiguous(),
        draft_logits,
        torch.cat([torch.zeros(REQUESTS, 1, dtype=torch.long), drafts], dim=1).flatten(),
        ends,
        positions,
        slots,
        slots.repeat_interleave(DRAFTS + 1),
        torch.arange(DRAFTS + 1, dtype=torch.int32).repeat(REQUESTS),
        torch.full((REQUESTS,), TEMPERATURE),
        seeds,
        DRAFTS,
    )
    fresh = derive_step_seeds(seeds, slots, begins)
    for sample, own_seeds in ((rejection_sample, seeds), (verify_with_fresh_noise(rejection_sample), fresh)):
        sampled, counts = sample(*arguments, use_block_verification=True)
        chance = numbers(own_seeds.repeat_interleave(DRAFTS), (begins[:, None] + torch.arange(DRAFTS)).flatten()).view(REQUESTS, DRAFTS)
        lengths, possible = accepted_by_the_rule(target, draft, drafts, chance)
        assert torch.equal(counts.long() - 1, lengths), (counts.tolist(), lengths.tolist())
        assert int((lengths == 0).sum()) > 0 and int((lengths == DRAFTS).sum()) > 0
        for request, length in enumerate(lengths.tolist()):
            assert sampled[request, :length].tolist() == drafts[request, :length].tolist()
            assert possible[request, sampled[request, length]]
    assert not torch.equal(numbers(seeds, begins), numbers(fresh, begins))
    print("the rule holds")


if __name__ == "__main__":
    main()
