"""Operations of a training step equal those that torch counts in the model of transformers; peaks of cards."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from mtpctl.families.reading import shape_of
from mtpctl.plan.flops import attention_flops, card_peak, step_flops

CONFIG = Qwen2Config(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    architectures=["Qwen2ForCausalLM"],
)
LENGTH = 24


def test_operations_of_a_step_equal_those_counted_by_torch() -> None:
    torch.manual_seed(0)
    config = CONFIG
    config._attn_implementation = "eager"
    model = Qwen2ForCausalLM(config)
    ids = torch.randint(config.vocab_size, (1, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    shape = shape_of(config.to_dict())
    # Eager attention computes the square's upper half as well, which the mask then hides.
    hidden = 3 * shape.layers * attention_flops(shape, [LENGTH])
    assert counter.get_total_flops() == pytest.approx(step_flops(shape, [LENGTH], LENGTH, [], isolated=False) + hidden, rel=1e-3)


def test_rows_without_log_probs_and_attention_across_samples_do_not_count() -> None:
    shape = shape_of(CONFIG.to_dict())
    whole, fewer = (step_flops(shape, [LENGTH], rows, [], isolated=False) for rows in (LENGTH, LENGTH - 10))
    assert whole - fewer == 6 * 10 * shape.hidden * shape.vocab
    assert 2 * attention_flops(shape, [LENGTH // 2] * 2) == attention_flops(shape, [LENGTH])


def test_an_isolated_drafter_computes_no_gradient_of_the_head() -> None:
    shape = shape_of(CONFIG.to_dict())
    joint, isolated = (step_flops(shape, [LENGTH], LENGTH, [20], isolated=each) for each in (False, True))
    assert joint - isolated == 2 * 20 * shape.hidden * shape.vocab


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", None),
        ("cpu", None),
    ],
)
def test_card_peaks_are_found_by_name(card: str, peak: float | None) -> None:
    assert card_peak(card) == peak
