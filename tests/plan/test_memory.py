"""Parameters of a rank, and the resulting bytes."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from mtpctl.errors import ClusterResources, UserError
from mtpctl.families.configs import hub_config
from mtpctl.families.quantization import select_fp8_names
from mtpctl.families.reading import shape_of
from mtpctl.families.shape import ModelShape
from mtpctl.families.tensors import count_parameters, tensor_shapes
from mtpctl.plan import memory as planning
from mtpctl.plan.buckets import section_buckets
from mtpctl.plan.memory import (
    ENGINE_GRAPH_BYTES,
    GIB,
    SAMPLER_COPIES,
    engine_memory,
    kv_bytes_per_token,
    logprob_memory,
    trainer_memory,
)
from mtpctl.plan.sharding import activation_width, drafter_width, layer_widths, peak_width, stage_layers, stages, transient_width
from mtpctl.recipe.loading import load_recipe
from mtpctl.recipe.numerics import sent_in_fp8
from mtpctl.recipe.schema import Recipe
from mtpctl.recipe.section import ParallelConfig
from tests.fakes.fits import check_fits
from tests.fakes.toys import LLAMA_DFLASH

MIMO = shape_of(hub_config("XiaomiMiMo/MiMo-7B-RL"))


SPLIT = ["logprob.parallel={tp: 2, pp: 2, pp_layout: [20, 16], sequence_parallel: false}"]


def recipe(*sets: str, name: str = "mimo7b_mtp") -> Recipe:
    return load_recipe(name, sets=sets).recipe


def test_a_single_rank_holds_all_parameters_once() -> None:
    (only,) = stages(MIMO, ParallelConfig(), depths=1)
    counted = count_parameters(MIMO)
    assert (only.parameters, only.mtp) == (counted["total"], counted["mtp"])
    assert stages(MIMO, ParallelConfig(), depths=0)[0].parameters == counted["total"] - counted["mtp"]


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallel_ranks_split_matrices_and_replicate_norms(tp: int) -> None:
    (rank,) = stages(MIMO, ParallelConfig(tp=tp), depths=1)
    norms = sum(prod(size) for name, size in tensor_shapes(MIMO).items() if "norm" in name)
    assert rank.parameters == norms + (count_parameters(MIMO)["total"] - norms) // tp


def test_the_last_pipeline_stage_holds_head_and_mtp_layers() -> None:
    first, last = stages(MIMO, ParallelConfig(pp=2, pp_layout=[20, 16]), depths=1)
    counted = count_parameters(MIMO)
    layer = sum(prod(size) for name, size in tensor_shapes(MIMO).items() if name.startswith("model.layers.0."))
    assert first.parameters == counted["embedding"] + 20 * layer
    # MTP layers read the embedding: the last stage has a copy.
    assert last.trunk == 16 * layer + counted["head"] + MIMO.hidden + counted["embedding"]
    assert (first.mtp, last.mtp) == (0, counted["mtp"])
    assert first.parameters + last.parameters == counted["total"] + counted["embedding"]


@pytest.mark.parametrize(
    ("layers", "depths", "pp", "counts"), [(6, 0, 3, [2, 2, 2]), (36, 1, 2, [19, 17]), (3, 2, 2, [3, 0]), (7, 0, 1, [7])]
)
def test_stages_are_even_if_mtp_depths_count_as_layers(layers: int, depths: int, pp: int, counts: list[int]) -> None:
    assert stage_layers(layers, depths, ParallelConfig(pp=pp)) == counts


def test_planned_layers_equal_those_of_the_built_stage() -> None:
    assert [stage.layers for stage in stages(MIMO, ParallelConfig(pp=2), depths=1)] == [range(19), range(19, 36)]
    repeated, laid_out = (recipe(f"train.parallel={{tp: 1, pp: 2{sets}}}", "mtp.repeat=3") for sets in ("", ", pp_layout: [20, 16]"))
    assert trainer_memory(repeated, MIMO) == trainer_memory(laid_out, MIMO)


def moe_shape() -> ModelShape:
    return shape_of(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 256,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        }
    )


def test_expert_parallelism_splits_only_experts() -> None:
    shape = moe_shape()
    whole, split = (stages(shape, ParallelConfig(ep=ep, dp=4), depths=0)[0].parameters for ep in (1, 4))
    assert whole - split == count_parameters(shape)["experts"] * 3 // 4


def test_expert_parallel_experts_are_not_split_by_tp() -> None:
    shape = moe_shape()
    layout = ParallelConfig(tp=2, sequence_parallel=True, dp=2, ep=2)
    experts = count_parameters(shape)["experts"]
    alone, both = (stages(shape, parallel, depths=0)[0].parameters for parallel in (ParallelConfig(tp=2), layout))
    assert both == alone  # half of the experts, each whole, or half of each expert
    four = layout.model_copy(update={"ep": 4, "dp": 4})
    assert alone - stages(shape, four, depths=0)[0].parameters == experts // 2 - experts // 4


def test_norms_of_an_mtp_projection_are_replicated() -> None:
    shape = shape_of(
        {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "layer_types": ["linear_attention", "full_attention"],
            "mtp_num_hidden_layers": 1,
        }
    )
    (whole,), (half,) = (stages(shape, ParallelConfig(tp=tp), depths=1) for tp in (1, 2))
    norms = sum(prod(size) for name, size in tensor_shapes(shape).items() if "norm" in name and "mtp" in name)
    assert half.mtp == norms + (whole.mtp - norms) // 2


LAYER = 2 * 4096 + (32 + 2 * 8 + 32) * 128 + 2 * 11008
"""Saved elements per token of a MiMo-7B layer: the inputs of both norms; queries, keys, values and output; gate and up."""


def test_trainer_memory_of_mimo_7b_in_bf16() -> None:
    memory = trainer_memory(recipe("train.parallel={tp: 1}", "train.tokens_per_microbatch=8192"), MIMO)
    total = count_parameters(MIMO)["total"]
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * total, 4 * total, 12 * total)
    assert memory.workspace == 1 << 30
    # Every layer's, MTP's included, and the states around the head while the loss is computed.
    assert memory.activations == 8192 * 2 * (37 * LAYER + (4 + 7) * 4096)


def test_states_around_the_head_are_freed_after_the_loss_except_rows_and_inputs() -> None:
    """The peak is in the loss, or in a layer's backward pass if its temporaries are larger than the freed states."""
    sets = "train.parallel={tp: 1}", "train.tokens_per_microbatch=8192", "mtp.mode=off", "rollout.speculation.num_tokens=0"
    assert trainer_memory(recipe(*sets), MIMO).activations == 8192 * 2 * (36 * LAYER + max(4 * 4096, 2 * 4096 + 4096 + 11008))
    recomputed = trainer_memory(recipe(*sets, "train.recompute=full"), MIMO).activations
    assert recomputed == 8192 * 2 * (36 * 4096 + 2 * 4096 + LAYER + 4096 + 11008)


def test_only_the_last_pipeline_stage_has_states_around_the_head() -> None:
    parallel = ParallelConfig(pp=2, pp_layout=[35, 1])
    created = recipe("train.parallel={pp: 2, pp_layout: [35, 1]}", "train.tokens_per_microbatch=8192")
    first, last = stages(MIMO, parallel, depths=1)
    planned = [planning._activation_bytes(created, MIMO, index, stage, 1, "rl") for index, stage in enumerate((first, last))]
    assert planned == [8192 * 2 * (2 * 35 * LAYER + 4096 + 11008), 8192 * 2 * (2 * LAYER + 11 * 4096)]


def test_loss_over_candidates_has_rows_and_gradients() -> None:
    sets = "train.parallel={tp: 1}", "train.tokens_per_microbatch=8192", "train.rl.teacher={path: teacher}"
    plain, candidates = (trainer_memory(recipe(*sets, f"train.rl.teacher.topk={k}"), MIMO).activations for k in (0, 8))
    assert candidates - plain == 8192 * 2 * 2 * 4096


def test_repeated_mtp_layer_is_not_recomputed() -> None:
    sets = "train.parallel={tp: 1}", "train.tokens_per_microbatch=8192", "train.recompute=full"
    one, two, three = (trainer_memory(recipe(*sets, f"mtp.repeat={n}"), MIMO).activations for n in (1, 2, 3))
    assert three - two == 8192 * 2 * (LAYER + 5 * 4096)
    assert two - one > 8192 * 2 * LAYER


def test_exact_sums_need_float64_temporaries() -> None:
    sets = "cluster.device=cpu", "train.precision=fp32", "train.tokens_per_microbatch=4096", "logprob.tokens_per_batch=4096"
    sets += "train.parallel.tp=1", "train.parallel.sequence_parallel=false"
    before, after = recipe(*sets), recipe(*sets, "numerics=bitwise")
    more = 8 * 4096 * max(2 * 4096, 11008) + 8 * (4 << 20)
    assert trainer_memory(after, MIMO).activations - trainer_memory(before, MIMO).activations == more
    assert logprob_memory(after, MIMO).activations - logprob_memory(before, MIMO).activations == more
    on_gpu = recipe("cluster.device=cuda", *sets[1:]), recipe("cluster.device=cuda", *sets[1:], "numerics=bitwise")
    assert trainer_memory(on_gpu[0], MIMO) == trainer_memory(on_gpu[1], MIMO), "there, sums are rounded in a fixed order"


def test_exact_layers_save_their_normed_inputs_with_sequence_parallelism() -> None:
    sets = "train.parallel.tp=2", "train.parallel.sequence_parallel=true", "train.tokens_per_microbatch=4096"
    before, after = (trainer_memory(recipe(*sets, f"numerics={numerics}"), MIMO).activations for numerics in ("default", "bitwise"))
    layers = MIMO.layers + 1
    assert after - before == 2 * 4096 * 4096 // 2 * layers * 2, "two inputs, half of the tokens, bf16"


def test_fp32_has_no_masters() -> None:
    memory = trainer_memory(recipe("train.precision=fp32"), MIMO)
    assert (memory.gradients, memory.optimizer) == (memory.weights, 2 * memory.weights)


def test_offloading_moves_memory_to_the_host_and_sharding_divides_it() -> None:
    plain = trainer_memory(recipe("train.parallel.dp=2"), MIMO)
    sharded = trainer_memory(recipe("train.parallel.dp=2", "train.distributed_optimizer=true"), MIMO)
    offloaded = trainer_memory(recipe("train.parallel.dp=2", "train.offload.optimizer=true"), MIMO)
    assert sharded.optimizer == plain.optimizer // 2
    assert (offloaded.optimizer, offloaded.host) == (0, plain.optimizer)


def test_a_distributed_optimizer_shards_experts_over_their_replicas() -> None:
    shape = moe_shape()
    routed = count_parameters(shape)["experts"]
    rest = count_parameters(shape)["total"] - routed
    sharded = ["mtp.mode=off", "rollout.speculation.num_tokens=0", "train.distributed_optimizer=true"]
    # Layout, and which part of all experts a rank holds and remembers. Two data-parallel ranks with different experts share nothing.
    for layout, stored, remembered in (("{dp: 2}", 1, 2), ("{dp: 2, ep: 2}", 2, 2), ("{dp: 4, ep: 2}", 2, 4), ("{cp: 2, ep: 2}", 2, 2)):
        memory = trainer_memory(recipe(f"train.parallel={layout}", *sharded, name="tiny_mtp"), shape)
        ranks = 4 if "4" in layout else 2
        assert memory.weights == 4 * (rest + routed // stored)
        assert memory.optimizer == 8 * (rest // ranks + routed // remembered), layout
    # With tp an expert is whole on its rank, and the ranks that have the same experts are as many more.
    both = trainer_memory(recipe("train.parallel={tp: 2, sequence_parallel: true, dp: 2, ep: 2}", *sharded, name="tiny_mtp"), shape)
    others = both.weights // 4 - routed // 2
    assert both.optimizer == 8 * (others // 2 + routed // 4)


def test_frozen_mtp_layers_have_gradient_buffers_and_sharded_state() -> None:
    idle, shards = "train.rl.train_mtp=false", ["train.parallel={tp: 1, dp: 2}", "train.distributed_optimizer=true"]
    one = ["train.parallel={tp: 1}", "train.tokens_per_microbatch=8192"]
    trained, alone = (trainer_memory(recipe(*one, *sets), MIMO) for sets in ([], [idle]))
    mtp = count_parameters(MIMO)["mtp"]
    assert (alone.weights, alone.gradients) == (trained.weights, trained.gradients)
    assert trained.optimizer - alone.optimizer == 12 * mtp
    frozen = 36 * LAYER + 2 * 4096 + 4096 + 11008
    assert trained.activations - alone.activations == 8192 * 2 * (37 * LAYER + 11 * 4096 - frozen)
    trained, alone = (trainer_memory(recipe(*shards, *sets), MIMO) for sets in ([], [idle]))
    assert trained.optimizer == alone.optimizer == 12 * count_parameters(MIMO)["total"] // 2
    assert alone.activations < trained.activations
    # A supervised stage trains them whatever RL does.
    both = trainer_memory(recipe("train.parallel={tp: 1}", idle, "train.stages=[sft, rl]", "train.sft.steps=1"), MIMO)
    assert both.optimizer == 12 * count_parameters(MIMO)["total"]


def test_the_reference_policy_is_a_copy_of_the_trained_parameters() -> None:
    free, stored = (trainer_memory(recipe("train.parallel={tp: 1}", f"train.rl.kl_coef={kl}"), MIMO) for kl in (0, 0.1))
    assert (free.reference, stored.reference) == (0, 2 * count_parameters(MIMO)["total"])
    assert stored.total >= free.total + stored.reference
    # While it scores, it is in the policy's place, which is kept aside: more than the activations of few tokens.
    few = trainer_memory(recipe("train.parallel={tp: 1}", "train.rl.kl_coef=0.1", "train.tokens_per_microbatch=1024"), MIMO)
    assert few.total == few.weights + few.gradients + few.optimizer + 2 * few.reference + few.workspace
    adapter = trainer_memory(recipe("train.parallel={tp: 1}", "train.rl.kl_coef=0.1", "train.lora={rank: 8}", "mtp.mode=load"), MIMO)
    assert adapter.reference == adapter.gradients // 2


def test_depths_that_share_a_layer_each_have_activations() -> None:
    settings = ["train.parallel={tp: 1}", "train.tokens_per_microbatch=8192"]
    one, three = (trainer_memory(recipe(*settings, f"mtp.repeat={n}"), MIMO) for n in (1, 3))
    assert three.weights == one.weights
    assert three.activations - one.activations == 2 * 8192 * 2 * (LAYER + 7 * 4096)


def test_each_input_of_a_block_has_activations_in_each_layer_of_a_block_drafter() -> None:
    settings = ["train.parallel={tp: 1}", "train.tokens_per_microbatch=1024"]
    shape = shape_of(LLAMA_DFLASH)
    one, three = (trainer_memory(recipe(*settings, f"mtp.repeat={n}"), shape) for n in (1, 3))
    width = activation_width(shape, ParallelConfig())
    assert three.activations - one.activations == pytest.approx(2 * 1024 * 2 * (2 * width + 7 * shape.hidden))
    cache = [kv_bytes_per_token(shape, 1, 2, drafting=drafting) for drafting in (True, False)]
    assert cache == [(4 + 2) * 2 * 32 * 2, 4 * 2 * 32 * 2]


def test_a_step_of_an_offloaded_optimizer_needs_masters_and_a_slice_of_moments() -> None:
    """With 1,024 tokens of MiMo-7B they exceed the activations, which are free by then."""
    few = trainer_memory(recipe("train.parallel={tp: 1}", "train.offload.optimizer=true", "train.tokens_per_microbatch=1024"), MIMO)
    assert few.step == 4 * count_parameters(MIMO)["total"] + 3 * (1 << 30)
    assert few.step > few.activations + few.workspace
    assert few.total == few.weights + few.gradients + few.step


def test_mtp_layers_that_are_only_loaded_need_only_weights() -> None:
    trained, loaded, off = (
        trainer_memory(recipe("train.parallel={tp: 1}", f"mtp.mode={mode}"), MIMO) for mode in ("isolated", "load", "off")
    )
    mtp = count_parameters(MIMO)["mtp"]
    assert trained.weights == loaded.weights == off.weights + 2 * mtp
    assert trained.gradients - loaded.gradients == 4 * mtp
    assert loaded.gradients == off.gradients


def test_an_adapter_needs_little_optimizer_memory() -> None:
    memory = trainer_memory(recipe("train.parallel={tp: 1}", "train.lora={rank: 8}", "mtp.mode=load"), MIMO)
    sides = 4096 + 48 * 128 + 4096 + 4096 + 4096 + 2 * 11008 + 11008 + 4096
    assert memory.gradients == 8 * 36 * sides * 4
    with_mtp = trainer_memory(recipe("train.parallel={tp: 1}", "train.lora={rank: 8}"), MIMO)
    assert with_mtp.gradients - memory.gradients == 4 * count_parameters(MIMO)["mtp"]


@pytest.mark.parametrize(("recompute", "smaller"), [("selective", 1.0), ("full", 0.15)])
def test_recomputation_reduces_activations(recompute: str, smaller: float) -> None:
    plain, less = (trainer_memory(recipe("train.parallel={tp: 1}", f"train.recompute={mode}"), MIMO) for mode in ("none", recompute))
    assert less.activations <= plain.activations * smaller


def test_sequence_parallelism_splits_the_remaining_activations() -> None:
    tp, sp = (activation_width(MIMO, ParallelConfig(tp=4, sequence_parallel=flag)) for flag in (False, True))
    assert sp == activation_width(MIMO, ParallelConfig()) / 4
    assert tp - sp == 2 * MIMO.hidden * 3 / 4


def test_the_reference_kernel_stores_all_logits() -> None:
    memory = trainer_memory(recipe("train.parallel={tp: 1}", "kernels.linear_logprob=reference", "train.tokens_per_microbatch=1024"), MIMO)
    assert memory.workspace == 1024 * 151680 * 8


def test_kv_cache_bytes_per_token() -> None:
    assert kv_bytes_per_token(MIMO, 1, 2, drafting=False) == 36 * 2 * 8 * 128 * 2
    assert kv_bytes_per_token(MIMO, 4, 2, drafting=True) == 37 * 2 * 2 * 128 * 2
    memory = engine_memory(recipe("rollout.kv_cache_bytes=10000000000"), MIMO)
    assert memory.kv_tokens == 10_000_000_000 // memory.kv_token
    assert engine_memory(recipe("cluster.gpu_gib="), MIMO).kv_tokens is None


def test_fp8_weights_take_one_byte_and_their_share_of_scales() -> None:
    fp8 = ["rollout.quantization=fp8", "rollout.kv_cache_bytes=10000000000"]
    sizes = tensor_shapes(MIMO)
    for drafter in ("fp8", "none"):
        quantized = sum(prod(sizes[name]) for name in select_fp8_names(MIMO, mtp=drafter == "fp8"))
        memory = engine_memory(recipe(*fp8, f"rollout.speculation.quantization={drafter}"), MIMO)
        plain = engine_memory(recipe(fp8[1]), MIMO)
        assert plain.weights - memory.weights == quantized - quantized * 4 // 128**2
        assert memory.kv_token == plain.kv_token
    assert engine_memory(recipe(*fp8, "rollout.engine_args={kv_cache_dtype: fp8}"), MIMO).kv_token * 2 == plain.kv_token


def test_fp8_names_are_determined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with 18,624 matrices of experts and attention."""
    calls = []

    def counted(*arguments: Any) -> frozenset[str]:
        calls.append(arguments)
        return sent_in_fp8(*arguments)

    monkeypatch.setattr(planning, "sent_in_fp8", counted)
    shape = shape_of(hub_config("Qwen/Qwen3-30B-A3B"))
    created = recipe("rollout.quantization=fp8", "mtp.mode=off", "rollout.speculation.num_tokens=0")
    assert engine_memory(created, shape).weights < 0.55 * engine_memory(recipe(), shape).weights
    assert len(calls) == 2 and len(sent_in_fp8(created, shape)) == 48 * (128 * 3 + 4)


def test_state_of_linear_attention_does_not_depend_on_the_cache_of_keys() -> None:
    shape = shape_of(hub_config("Qwen/Qwen3.5-35B-A3B"))
    plain, fp8 = (engine_memory(recipe(*sets), shape) for sets in ([], ["rollout.engine_args={kv_cache_dtype: fp8}"]))
    assert fp8.sequence_state == plain.sequence_state > 0 and fp8.kv_token * 2 == plain.kv_token


def test_windows_take_cache_for_each_sequence_instead_of_each_token() -> None:
    shape = shape_of(hub_config("XiaomiMiMo/MiMo-V2-Flash"))
    assert kv_bytes_per_token(shape, 2, 2, drafting=True) == 9 * 2 * (192 + 128) * 2
    memory = engine_memory(recipe("rollout.tp=4", name="mimo_v2_flash_mtp"), shape)
    assert memory.sequence_state == (39 + 3) * 128 * 2 * (192 + 128) * 2
    assert memory.states == 64 * memory.sequence_state


def test_the_default_cache_on_a_cpu_fits_one_sample_of_full_length() -> None:
    recipe = load_recipe("tiny_mtp", sets=["rollout.kv_cache_bytes=null"]).recipe
    short = engine_memory(recipe, shape_of(recipe.model.config or {}))
    assert short.kv_cache == 256 << 20
    long = engine_memory(recipe, shape_of({**(recipe.model.config or {}), "max_position_embeddings": 1 << 20}))
    assert long.kv_tokens == 1 << 20


def test_a_cache_too_small_for_one_sample_is_an_error_with_the_minimum() -> None:
    needed = 10240 * kv_bytes_per_token(MIMO, 1, 2, drafting=True)
    with pytest.raises(UserError, match=f"rollout.kv_cache_bytes: .* needs {needed} bytes; raise it, or lower rollout.context"):
        check_fits(recipe(f"rollout.kv_cache_bytes={needed - 1}"), MIMO)
    check_fits(recipe(f"rollout.kv_cache_bytes={needed}"), MIMO)


def test_a_cache_that_exceeds_the_gpu_or_its_share_is_an_error() -> None:
    with pytest.raises(ClusterResources, match=r"rollout.kv_cache_bytes: 128.0 GiB and 14.6 GiB of weights exceed the GPU's 139 GiB"):
        check_fits(recipe(f"rollout.kv_cache_bytes={128 * GIB}"), MIMO)
    with pytest.raises(UserError, match=r"rollout.gpu_memory: 0.11 leaves a KV cache of [0-9]+ bytes, which hold [0-9]+ tokens"):
        check_fits(recipe("rollout.gpu_memory=0.11"), MIMO)


QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5120,
    "vocab_size": 151936,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_nextn_predict_layers": 1,
}
QWEN3_5 = QWEN3_NEXT_80B | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "mamba_ssm_dtype": "float32"}
PLAIN = ["rollout.max_in_flight=256", "rollout.context=4096", "cluster.gpu_gib=", "rollout.engine_args={enable_prefix_caching: false}"]


@pytest.mark.parametrize(
    ("config", "tp", "drafts", "caching", "precise"),
    [
        (QWEN3_NEXT_80B, 1, 0, False, False),
        (QWEN3_NEXT_80B, 4, 0, False, False),
        (QWEN3_NEXT_80B, 1, 1, False, False),
        (QWEN3_NEXT_80B, 2, 1, True, False),
        (QWEN3_5, 1, 0, False, True),
        (QWEN3_NEXT_80B | {"mamba_ssm_dtype": "float32"}, 1, 0, False, False),
    ],
)
def test_state_bytes_of_linear_attention(config: dict[str, Any], tp: int, drafts: int, caching: bool, precise: bool) -> None:
    """Computed from the state shapes of vLLM's gated delta net, for 36 of 48 layers."""
    shape = shape_of(config)
    sets = PLAIN[:-1] if caching else PLAIN
    memory = engine_memory(recipe(*sets, f"rollout.tp={tp}", f"rollout.speculation.num_tokens={drafts}"), shape)
    convolved, state = 8192 // tp * (3 + drafts), 32 // tp * 128 * 128
    one = 36 * (convolved * 2 + state * (4 if precise else 2))
    assert memory.sequence_state == (1 + drafts + caching) * one
    assert memory.states == 256 * memory.sequence_state


def test_states_of_256_sequences_of_qwen3_next() -> None:
    memory = engine_memory(recipe(*PLAIN, "rollout.speculation.num_tokens=0"), shape_of(QWEN3_NEXT_80B))
    assert round(memory.states / GIB, 1) == 9.4
    cached = engine_memory(
        recipe(*PLAIN, "rollout.speculation.num_tokens=0", f"rollout.kv_cache_bytes={20 * GIB}"), shape_of(QWEN3_NEXT_80B)
    )
    assert cached.kv_tokens == (20 * GIB - cached.states) // cached.kv_token


def test_the_cache_must_fit_the_state_of_one_sequence() -> None:
    sets, shape = [*PLAIN, "rollout.speculation.num_tokens=0"], shape_of(QWEN3_NEXT_80B)
    free = engine_memory(recipe(*sets), shape)
    needed = 4096 * free.kv_token + free.sequence_state
    assert engine_memory(recipe(*sets, f"rollout.kv_cache_bytes={needed}"), shape).kv_tokens == 0
    with pytest.raises(UserError, match=f"needs {needed} bytes; raise it"):
        check_fits(recipe(*sets, f"rollout.kv_cache_bytes={needed - 1}"), shape)


def test_full_attention_has_no_state() -> None:
    assert engine_memory(recipe(), MIMO).states == 0


def test_a_log_prob_rank_holds_one_layers_activations_and_one_or_two_versions() -> None:
    one, two = (logprob_memory(recipe(f"logprob.keep_previous={flag}"), MIMO) for flag in ("false", "true"))
    assert two.weights == 2 * one.weights == 4 * count_parameters(MIMO)["total"]
    assert one.activations < 4 * GIB


def test_a_log_prob_rank_stores_base_weights_of_synced_adapters() -> None:
    lora = ["train.lora={rank: 16}", "sync.sections=[adapter, draft]"]
    merged = logprob_memory(recipe(lora[0]), MIMO)
    alone, split, retained = (logprob_memory(recipe(*lora, *sets), MIMO) for sets in ([], SPLIT, ["logprob.keep_previous=true"]))
    layers = sum(prod(size) for name, size in tensor_shapes(MIMO).items() if name.startswith("model.layers.") and "_proj.weight" in name)
    assert merged.base_weights == 0 and alone.base_weights == retained.base_weights == 2 * layers
    assert alone.total == merged.total + alone.base_weights
    # Two ranks of tensors in two stages, of 20 and 16 of the 36 layers.
    assert split.base_weights == 2 * layers * 20 // 36 // 2
    some = logprob_memory(recipe("train.lora={rank: 16, targets: [linear_fc2]}", lora[1]), MIMO)
    assert some.base_weights == 2 * MIMO.layers * MIMO.hidden * MIMO.ffn


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["train.parallel={tp: 1}"], "train.parallel: a trainer rank needs .* GiB, but has 139 GiB"),
        (["rollout.gpu_memory=0.1"], "rollout.gpu_memory: 13.9 GiB of the GPU are too small for 14.6 GiB of weights"),
        (["logprob.gpus=0.1", "rollout.gpu_memory=0.8"], "logprob.gpus: a rank needs .* GiB, but its share is 14 GiB"),
        (["logprob.gpus=0.3", "rollout.gpu_memory=0.8"], "share a GPU and exceed it"),
        (
            ["train.lora={rank: 16}", "sync.sections=[adapter, draft]", "logprob.gpus=0.2", "rollout.gpu_memory=0.5"],
            "logprob.gpus: a rank needs 3. GiB, but its share is 28 GiB",
        ),
    ],
)
def test_ranks_that_exceed_a_gpu_are_errors(sets: list[str], message: str) -> None:
    with pytest.raises(ClusterResources, match=message):
        check_fits(recipe(*sets), MIMO)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["train.gpus=0.4", "rollout.gpus=0.6", "rollout.gpu_memory=0.7"],
            "gpu_memory: 0.7 and train.gpus: 0.4 share a GPU and exceed it",
        ),
        (
            ["train.gpus=0.4", "rollout.gpus=0.4", "rollout.gpu_memory=0.5", "logprob.standalone=true", "logprob.gpus=0.2"],
            "gpu_memory: 0.5 and train.gpus: 0.4 and logprob.gpus: 0.2 share a GPU and exceed it",
        ),
        (["train.gpus=0.4", "rollout.gpus=0.6", "rollout.gpu_memory=0.6"], ""),
        (["rollout.gpus=0.3", "rollout.gpu_memory=0.4", "rollout.replicas=3"], "gpu_memory: 0.4 of 3 engines share a GPU and exceed it"),
        (
            ["train.gpus=0.4", "rollout.gpus=0.3", "rollout.gpu_memory=0.35", "rollout.replicas=5"],
            "gpu_memory: 0.35 of 2 engines and train.gpus: 0.4 share a GPU and exceed it",
        ),
        (["train.gpus=0.4", "rollout.gpus=0.3", "rollout.replicas=5"], ""),
        # On separate GPUs, and if nothing is generated.
        (["train.gpus=0.4", "rollout.gpu_memory=0.9"], ""),
        (["train.gpus=0.4", "rollout.gpus=0.6", "rollout.gpu_memory=0.9", "train.stages=[sft]", "train.sft.steps=1"], ""),
    ],
)
def test_ranks_on_a_shared_gpu_are_checked_together(sets: list[str], message: str) -> None:
    created = recipe("cluster.gpu_gib=80", *sets, name="tiny_mtp")
    if message:
        with pytest.raises(ClusterResources, match=message):
            check_fits(created, moe_shape())
    else:
        check_fits(created, moe_shape())


def test_the_default_memory_of_an_engine_follows_its_share_of_the_gpu() -> None:
    """The weights, everything that vLLM does not count as cache, and the cache add up to 0.95 of the share."""
    gpu = ["cluster.device=cuda", "sync.transport=ipc", "cluster.gpu_gib=80", "rollout.kv_cache_bytes=null"]
    sets = ["train.gpus=0.25", "rollout.gpus=0.3", "rollout.replicas=4", "rollout.on_trainer_gpus=1"]
    created, shape = recipe(*gpu, *sets, name="tiny_mtp"), moe_shape()
    for index, share in ((None, 0.3), (0, 0.75), (1, 0.3)):
        memory = engine_memory(created, shape, index)
        assert memory.reserve > 0
        whole = memory.weights + memory.reserve + (memory.kv_cache or 0)
        assert whole == pytest.approx(min(0.85, 0.95 * share) * 80 * GIB)
    alone = engine_memory(recipe(*gpu, name="tiny_mtp"), shape)
    assert (alone.reserve, alone.weights + (alone.kv_cache or 0)) == (0, pytest.approx(0.85 * 80 * GIB))


def test_the_reserve_covers_logits_and_activations_of_the_largest_step() -> None:
    """Beyond CUDA's own memory: four fp32 copies of each sampled position's logits; and the activations of all tokens of a step."""
    sets = [
        "rollout.gpus=0.5",
        "rollout.max_in_flight=100",
        "rollout.speculation.num_tokens=1",
        "rollout.engine_args={max_num_batched_tokens: 1000}",
    ]
    small, more = (engine_memory(recipe(*sets, each), MIMO) for each in ("rollout.eager=true", "rollout.max_in_flight=200"))
    graphs = ENGINE_GRAPH_BYTES
    assert more.reserve - small.reserve - graphs == 100 * 2 * MIMO.vocab * 4 * SAMPLER_COPIES
    longer = engine_memory(recipe(*sets[:-1], "rollout.eager=true", "rollout.engine_args={max_num_batched_tokens: 2000}"), MIMO)
    assert longer.reserve - small.reserve >= 1000 * 2 * (MIMO.hidden + 3 * MIMO.ffn)


def test_memory_is_not_checked_without_the_gpus_size() -> None:
    check_fits(recipe("train.parallel={tp: 1}", "cluster.gpu_gib="), MIMO)


def test_sections_contain_each_tensor_once() -> None:
    buckets = section_buckets(recipe(), MIMO)
    names = [entry.name for section in buckets.values() for bucket in section for entry in bucket.entries if entry.part_start == 0]
    assert sorted(names) == sorted(tensor_shapes(MIMO))
    assert sum(entry.nbytes for section in buckets.values() for b in section for entry in b.entries) == 2 * count_parameters(MIMO)["total"]
    assert set(section_buckets(recipe("sync.sections=[target]"), MIMO)) == {"target"}
    assert set(section_buckets(recipe("mtp.mode=off"), MIMO)) == {"target"}


def test_mamba_layers_take_state_for_each_sequence_and_no_cache() -> None:
    shape = shape_of(hub_config("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16"))
    # Six attention layers and the MTP layer's.
    assert kv_bytes_per_token(shape, 1, 2, drafting=True) == 7 * 2 * 2 * 128 * 2
    memory = engine_memory(recipe(name="nemotron_3_5_lightning_mtp"), shape)
    channels, state = 64 * 64 + 2 * 8 * 128, 64 * 64 * 128
    # One copy of each state for the sequence, one for its draft, one at the last block boundary; convolutions in bf16, states in fp32.
    assert memory.sequence_state == 3 * 23 * (channels * (3 + 1) * 2 + state * 4)


LIGHTNING = shape_of(hub_config("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16"))
MAMBA = 2688 + 3 * 64 * 64 + 3 * (64 * 64 + 2 * 8 * 128) + 6 * 64 + 2 * 64 * 128
"""Saved elements per token of a Mamba-2 layer of Nemotron 3.5 Lightning."""
ATTENTION = 2688 + 2 * (32 + 2) * 128
"""The same of an attention layer."""
EXPERTS = 2 * 2688 + 3 * 128 + 4 * 6 + 6 * 1856 + 3712
"""The same of a layer with experts: its input, the normed state, the router, and one inner matrix of experts without a gate."""


def test_width_of_a_nemotron_layer_is_that_of_its_mixer_or_mlp() -> None:
    widths = layer_widths(LIGHTNING, ParallelConfig(), range(LIGHTNING.layers))
    assert widths == [{"mamba": MAMBA, "full_attention": ATTENTION, "none": EXPERTS}[kind] for kind in LIGHTNING.layer_kinds]
    assert drafter_width(LIGHTNING, ParallelConfig()) == ATTENTION + EXPERTS


def test_temporaries_of_experts_without_a_gate_have_one_inner_matrix() -> None:
    assert transient_width(LIGHTNING, ParallelConfig()) == 2688 + 6 * (2 * 2688 + 1856) + 3712


def test_recomputation_needs_the_largest_layer_of_a_hybrid_model() -> None:
    transient = transient_width(LIGHTNING, ParallelConfig())
    assert EXPERTS + transient > MAMBA + 2688, "experts, whose temporaries are larger"
    peak = peak_width(LIGHTNING, ParallelConfig(), range(LIGHTNING.layers), drafter=False)
    assert peak == EXPERTS + transient
    assert peak_width(LIGHTNING, ParallelConfig(), range(LIGHTNING.layers), drafter=True) == ATTENTION + EXPERTS + transient
    memory = trainer_memory(recipe("train.tokens_per_microbatch=1024", name="nemotron_3_5_lightning_mtp"), LIGHTNING)
    # With the inputs of both final norms, the rows of both losses, and the embedding of the MTP layer with its gradient.
    assert memory.activations == 1024 * 2 * (53 * 2688 + ATTENTION + EXPERTS + transient + 5 * 2688)


def test_recomputation_of_a_dense_hybrid_model_needs_its_mamba_layer() -> None:
    config = hub_config("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16") | {"hybrid_override_pattern": "M-*-M-", "num_hidden_layers": 6}
    shape = shape_of(config)
    sets = ["train.parallel={tp: 1}", "train.tokens_per_microbatch=1024", "mtp.mode=off", "rollout.speculation.num_tokens=0"]
    memory = trainer_memory(recipe(*sets, "train.recompute=full"), shape)
    head = 2 * 2688
    assert memory.activations == 1024 * 2 * (6 * 2688 + MAMBA + 2688 + head)
    stored = trainer_memory(recipe(*sets, "train.recompute=none"), shape)
    assert stored.activations == 1024 * 2 * (2 * MAMBA + ATTENTION + 3 * (2688 + 1856) + max(2688 + 1856 + head, 4 * 2688))
