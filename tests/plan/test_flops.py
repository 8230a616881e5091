"""Operations of a training step equal those that torch counts in the model of transformers; peaks of GPUs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from mtpctl.families.configs import hub_config
from mtpctl.families.reading import shape_of
from mtpctl.families.tensors import tensor_shapes
from mtpctl.plan.flops import TrunkTraining, attention_flops, attention_weights, peak_flops, step_flops, trunk_weights
from tests.fakes.toys import LLAMA_DFLASH

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
TRUNKS: tuple[TrunkTraining, ...] = ("all", "adapter", "none")


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
    joint_adapter, isolated_adapter = (step_flops(shape, [LENGTH], LENGTH, [20], isolated=each, trunk="adapter") for each in (False, True))
    assert joint_adapter == isolated_adapter, "the head is frozen"


def test_a_trunk_that_is_not_trained_computes_fewer_gradients() -> None:
    """With an adapter there are no weight gradients, and if only the drafter is trained, no backward pass."""
    shape = shape_of(CONFIG.to_dict())
    whole, adapter, none = (step_flops(shape, [LENGTH], LENGTH, [], isolated=True, trunk=each) for each in TRUNKS)
    weights = LENGTH * (trunk_weights(shape) + shape.hidden * shape.vocab)
    pairs = shape.layers * attention_flops(shape, [LENGTH])
    assert (whole - adapter, adapter - none) == (2 * weights, 2 * weights + 2 * pairs)


def test_every_input_of_a_block_uses_all_matrices_of_a_block_drafter() -> None:
    """The context uses the projection to it and those to queries, keys and values."""
    shape = shape_of(LLAMA_DFLASH)
    sizes = {name: size[0] * size[1] for name, size in tensor_shapes(shape).items() if name.startswith("drafter.") and len(size) == 2}
    matrices, qkv, fc = (
        sum(size for name, size in sizes.items() if any(part in name for part in parts))
        for parts in (("layers.",), ("q_proj", "k_proj", "v_proj"), ("fc",))
    )
    drafted, plain = (step_flops(shape, [10], 0, rows, isolated=True) for rows in ([0, 0, 0], []))
    pairs = 3 * (4 * 2) * attention_flops(shape, [10])
    assert drafted - plain == 6 * 10 * (4 * matrices + qkv + fc) + pairs


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", None),
        ("cpu", None),
    ],
)
def test_peak_flops_are_looked_up_by_gpu_name(gpu: str, peak: float | None) -> None:
    assert peak_flops(gpu) == peak


def test_window_attention_counts_its_own_weights_and_pairs_within_the_window() -> None:
    shape, lengths = shape_of(hub_config("XiaomiMiMo/MiMo-V2-Flash")), [1, 100, 128, 129, 1000]
    pairs = sum(min(token + 1, 128) for length in lengths for token in range(length))
    assert attention_flops(shape, lengths, "sliding_attention") == 2 * 64 * (192 + 128) * pairs
    tensors = tensor_shapes(shape)
    for layer, kind in ((0, "full_attention"), (1, "sliding_attention")):
        matrices = [size for name, size in tensors.items() if name.startswith(f"model.layers.{layer}.self_attn.") and len(size) == 2]
        assert attention_weights(shape, kind) == sum(rows * columns for rows, columns in matrices)  # type: ignore[arg-type]


def test_only_layers_with_softmax_attention_have_pairs_of_tokens() -> None:
    shape = shape_of(hub_config("XiaomiMiMo/MiMo-V2-Flash"))
    one, two = (step_flops(shape, lengths, 0, [0, 0, 0], isolated=True) for lengths in ([2048], [1024, 1024]))
    by_kind = {kind: attention_flops(shape, [2048], kind) - attention_flops(shape, [1024, 1024], kind) for kind in set(shape.layer_kinds)}
    assert one - two == 3 * (9 * by_kind["full_attention"] + (39 + 3) * by_kind["sliding_attention"])


def test_layers_of_nemotron_count_their_mixer_or_their_mlp() -> None:
    """All matrices of the layers that a token uses, plus the convolution and the recurrence of each Mamba-2 layer."""
    shape = shape_of(hub_config("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"))
    assert shape.mamba is not None and shape.moe is not None
    expected = 0
    for name, size in tensor_shapes(shape).items():
        if name.startswith("backbone.layers.") and len(size) == 2:
            expected += size[0] * size[1] * (1 if ".experts." not in name else 0)
    sparse = shape.layer_kinds.count("none")
    expected += sparse * shape.moe.experts_per_token * 2 * shape.hidden * shape.moe.ffn
    recurrences = shape.layer_kinds.count("mamba") * (4 * (64 * 64 + 2 * 8 * 128) + 3 * 64 * 64 * 128)
    assert trunk_weights(shape) == expected + recurrences
