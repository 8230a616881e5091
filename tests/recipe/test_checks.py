"""Incompatible settings are rejected with one line that begins with the field and ends with a fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpctl.cli.app import main
from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.families.reading import shape_of
from mtpctl.plan.memory import GIB, engine_memory, trainer_memory
from mtpctl.plan.placement import place
from mtpctl.recipe.checks import cautions_of, list_complaints, validate
from mtpctl.recipe.data import check_path
from mtpctl.recipe.loading import RECIPES, list_recipes, load_recipe
from mtpctl.recipe.model import ModelConfig, hf_config
from mtpctl.recipe.numerics import FAMILIES, check_gpu
from mtpctl.recipe.rl import PRESETS
from mtpctl.recipe.train import check_moe
from tests.fakes.fits import check_fits
from tests.fakes.toys import GLM4_MOE, LLAMA_DFLASH, LLAMA_EAGLE3, QWEN3_5, QWEN3_DFLASH, QWEN3_EAGLE3, QWEN3_MOE_EAGLE3, SERVED, TOYS


def complaint(*sets: str, recipe: str = "tiny_mtp") -> str:
    """The one thing that is wrong."""
    result = list(list_complaints(load_recipe(recipe, sets=sets).recipe))
    assert len(result) == 1, result
    with pytest.raises(UserError) as caught:
        validate(load_recipe(recipe, sets=sets).recipe)
    assert str(caught.value) == result[0] and "\n" not in result[0]
    return result[0]


# Sizes that the messages below count, whatever the recipe is tuned to.
SIZES = [
    f"model.config.{name}={value}"
    for name, value in {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }.items()
]


EAGLE3 = f"model.config={json.dumps(LLAMA_EAGLE3)}"
DFLASH = (f"model.config={json.dumps(LLAMA_DFLASH)}", "mtp.repeat=3", "rollout.speculation.num_tokens=3")
DRAFT = ["train.stages=[draft, rl]", "train.draft.steps=5"]

# A recipe for one GPU, which the tests' recipes are not.
BITWISE, CORRECTED = ["numerics=bitwise"], ["train.rl.correction.mode=truncate"]
GPU = ["cluster.device=cuda", "sync.transport=nccl"]
BITWISE_GPU = [*BITWISE, *GPU, "train.precision=bf16"]


@pytest.mark.parametrize("path", list_recipes(), ids=lambda path: path.stem)
def test_included_recipes_are_valid(path: Path) -> None:
    validate(load_recipe(path).recipe)


@pytest.mark.parametrize("path", list_recipes(RECIPES / "overlays"), ids=lambda path: path.stem)
def test_included_overlays_are_valid(path: Path) -> None:
    # Toys of a family go on top of `toy`; what is not named here fits the small model.
    of = {"h200": "mimo7b_mtp", "qwen3_5": "qwen3_5_35b_a3b_mtp", "toy_qwen3_5": "qwen3_5_35b_a3b_mtp"}
    of |= {"toy_glm4_7_flash": "glm4_7_flash_mtp", "toy_glm4": "glm4_5_air_mtp", "toy_ernie4_5": "ernie4_5_21b_a3b_mtp"}
    of |= {"toy_mimo_v2": "mimo_v2_flash_mtp", "toy_nemotron": "nemotron_3_5_lightning_mtp"}
    recipe = next((name for start, name in of.items() if path.stem.startswith(start)), "mimo_small_mtp")
    below = ["toy"] if path.stem.startswith("toy_") else []
    validate(load_recipe(recipe, overlays=[*below, path]).recipe)


MOE_RECIPES = [
    ["qwen3_5_35b_a3b_mtp"],
    ["qwen3_5_35b_a3b_mtp", "qwen3_5_all_weights"],
    ["glm4_5_air_mtp"],
    ["glm4_7_flash_mtp"],
    ["ernie4_5_21b_a3b_mtp"],
    ["mimo_v2_flash_mtp"],
    ["nemotron_3_5_lightning_mtp"],
]


@pytest.mark.parametrize("names", MOE_RECIPES, ids="-".join)
def test_mixtures_of_experts_fit_their_gpus_with_a_tenth_to_spare(names: list[str]) -> None:
    recipe = load_recipe(names[0], overlays=names[1:]).recipe
    shape = shape_of(hf_config(recipe.model))
    check_fits(recipe, shape)
    assert trainer_memory(recipe, shape).total <= 0.9 * recipe.cluster.gpu_gib * GIB
    assert engine_memory(recipe, shape).kv_tokens >= 4 * recipe.rollout.context
    hosts = 2 if names == ["mimo_v2_flash_mtp"] else 1
    assert place(recipe).gpus == hosts * recipe.cluster.gpus_per_node


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["train.checkpoint_every=5", "train.keep_checkpoints=0"], "train.checkpoint_every: 5, but train.keep_checkpoints is 0"),
        (["model.tokenizer="], "model.tokenizer: a model from model.config has no tokenizer"),
        (["model.config.vocab_size=256"], "model.config.vocab_size: 256 is too small for the 259 ids of the byte tokenizer"),
        (["model.config.num_nextn_predict_layers=0"], "mtp.mode: isolated needs an MTP head, but the model has none; leave mtp.mode out"),
        (
            ["model.config.num_nextn_predict_layers=0", "mtp.mode=off"],
            "rollout.speculation.num_tokens: 1 needs an MTP head, but the model has none; leave it out, or set it to 0",
        ),
        (
            ["mtp.repeat=2", "model.config.num_nextn_predict_layers=2"],
            "mtp.repeat: 2 depths share one MTP layer, but the model has 2",
        ),
        (["mtp.mode=off"], "rollout.speculation.num_tokens: 1 needs the MTP layers that mtp.mode: off leaves out"),
        (["rollout.speculation={num_tokens: 0, auto: true}"], "rollout.speculation.auto: has no effect"),
        (["rollout.speculation={method: ngram, auto: true}"], "rollout.speculation.auto: works with method: model, not ngram"),
        (
            ["rollout.speculation={method: ngram, draft_method: probabilistic}"],
            "rollout.speculation.draft_method: drafts of ngram have no probabilities",
        ),
        (["rollout.speculation.method=suffix"], "rollout.speculation.method: suffix needs the package arctic-inference"),
        (["async.deterministic=true", "rollout.speculation.auto=true"], "rollout.speculation.auto: depends on measured speed"),
        (
            ["async.deterministic=true", "rollout.speculation.draft_method=probabilistic"],
            "rollout.speculation.draft_method: probabilistic ignores the seeds",
        ),
        (
            ["model.config.num_nextn_predict_layers=2", "rollout.speculation.num_tokens=2"],
            "rollout.speculation.num_tokens: 2, but vLLM on a CPU drafts every token with the first of the model's 2 MTP layers",
        ),
        (
            ["cluster.device=cuda", "model.config.num_nextn_predict_layers=2", "rollout.speculation.num_tokens=4"],
            "rollout.speculation.num_tokens: 4, but after the model's 2 MTP layers vLLM starts over with the first",
        ),
        (["train.stages=[]"], "train.stages: must be draft, sft and rl"),
        (
            ["rollout.speculation={verification: block, draft_method: probabilistic}"],
            "rollout.speculation.verification: vLLM on a CPU verifies token by token; set token",
        ),
        (
            [*GPU, "rollout.speculation.verification=block"],
            "rollout.speculation.verification: block accepts no more greedy drafts than token; set draft_method: probabilistic",
        ),
        (
            [*GPU, "rollout.speculation={verification: block, method: ngram}"],
            "rollout.speculation.verification: drafts of ngram have no probabilities, so block accepts no more of them; set token",
        ),
        (["mtp.loss=e2e_tv", "mtp.mode=joint"], "mtp.loss: e2e_tv trains the MTP layers only, but mtp.mode: joint also trains the trunk"),
        ([EAGLE3, "mtp.mode=joint"], "mtp.mode: joint is not supported with an EAGLE-3 drafter"),
        ([EAGLE3, "train.parallel.pp=2"], "train.parallel.pp: an EAGLE-3 drafter reads states of several stages"),
        ([*DFLASH, "mtp.mode=joint"], "mtp.mode: joint is not supported with a DFlash drafter"),
        ([*DFLASH, "train.parallel.pp=2"], "train.parallel.pp: a DFlash drafter reads states of several stages"),
        (
            [*DFLASH, "rollout.speculation.num_tokens=2"],
            "rollout.speculation.num_tokens: 2, but the DFlash drafter is trained for blocks of mtp.repeat (3) drafts",
        ),
        ([*DFLASH, "rollout.speculation.auto=true"], "rollout.speculation.auto: not supported with a DFlash drafter"),
        (
            [*GPU, *DFLASH, "rollout.speculation.verification=block", "rollout.speculation.draft_method=probabilistic"],
            "rollout.speculation.verification: block is not supported with a DFlash drafter; set token",
        ),
        (["train.stages=[rl, draft]", "train.draft.steps=5"], "train.stages: draft must come first"),
        (["train.stages=[sft, draft]", "train.draft.steps=5"], "train.stages: draft must come first"),
        (["train.stages=[draft, rl]"], "train.draft.steps: is 0; set the number of updates, or leave draft out of train.stages"),
        ([*DRAFT, "train.distributed_optimizer=true"], "train.distributed_optimizer: is not supported in the stage draft"),
        ([*DRAFT, "mtp.mode=load"], "mtp.mode: load does not train the drafter, but the stage draft does; set it to isolated"),
        ([*DRAFT, "mtp.mode=off", "rollout.speculation.num_tokens=0"], "mtp.mode: off does not train the drafter"),
        (
            [*DRAFT, "model.config.num_nextn_predict_layers=0", "mtp.mode=off", "rollout.speculation.num_tokens=0"],
            "train.stages: draft trains a drafter, but the model has none; add one with model.drafter, or with mtpctl add-drafter",
        ),
        ([*DRAFT, "train.draft.optimizer.betas=[0.9, 1.0]"], "train.draft.optimizer.betas: must lie in [0, 1)"),
        (["train.stages=[rl, rl]"], "train.stages: must be draft, sft and rl, at least one and each at most once, got [rl, rl]"),
        (["train.rl.steps=0"], "train.rl.steps: is 0; set the number of updates, or leave rl out of train.stages"),
        (["train.sft.steps=0"], "train.sft.steps: is 0"),
        (
            ["train.rl={prompts_per_step: 16, minibatches: 3}"],
            "train.rl.minibatches: 3 does not divide train.rl.prompts_per_step: 16; 1, 2, 4, 8, 16",
        ),
        (["train.rl.group_size=1"], "train.rl.group_size: the grpo baseline needs at least 2 responses"),
        (["train.rl.group_size=1", "train.rl.preset=reinforce++_baseline"], "train.rl.group_size: the reinforce_pp_baseline baseline"),
        (
            ["train.rl.group_size=1", "train.rl.advantage=reinforce_pp"],
            "train.rl.dynamic_sampling: replaces every group of group_size: 1, whose rewards cannot differ; set it to false",
        ),
        (["train.rl.signal_backoff=true", "train.rl.dynamic_sampling=false"], "train.rl.signal_backoff: needs dynamic_sampling: true"),
        (
            ["train.rl.signal_backoff=true", "train.rl.teacher.path=org/teacher"],
            "train.rl.signal_backoff: a teacher trains on groups without",
        ),
        (["train.rl.signal_backoff=true", "async.deterministic=true"], "train.rl.signal_backoff: which prompts are skipped depends"),
        (["train.rl.clip_low=1"], "train.rl.clip_low: must be below 1, got 1.0"),
        (["train.rl.clip_low=1.5", "train.rl.loss=cispo"], "train.rl.clip_low: must be at most 1, got 1.5"),
        (["train.rl.clip_dual=3", "train.rl.loss=cispo"], "train.rl.clip_dual: loss: cispo has no dual clip; set it to 0"),
        (["train.rl.loss_args={a: 1}"], "train.rl.loss_args: loss: ppo takes none; leave them out, or name your own loss"),
        (["train.sft.optimizer.betas=[0.9, 1.0]"], "train.sft.optimizer.betas: must lie in [0, 1)"),
        (["rollout.temperature=0.001"], "rollout.temperature: the minimum of vLLM is 0.01"),
        (["rollout.top_p=0.9"], "rollout.top_p: 0.9 renormalizes the sampling distribution"),
        (["rollout.top_k=5"], "rollout.top_k: 5 renormalizes the sampling distribution"),
        (["train.rl.correction={mode: mask, low: 3}"], "train.rl.correction.low: must be below high: 2.0, got 3"),
        (
            ["train.rl.old_logprobs=behaviour", "logprob.standalone=true"],
            "train.rl.old_logprobs: behaviour leaves the log-prob servers without work",
        ),
        (
            ["train.rl.old_logprobs=behaviour", "train.rl.correction.mode=truncate"],
            "train.rl.correction.mode: old_logprobs: behaviour leaves nothing to correct",
        ),
        (["train.rl.old_logprobs=behaviour", "train.rl.loss=decoupled"], "train.rl.loss: decoupled needs a proximal policy"),
        (["train.rl.clip_low=1"], "train.rl.clip_low: must be below 1"),
        (["train.rl.clip_dual=0.5"], "train.rl.clip_dual: must be above 1, or 0"),
        (
            ["rollout.max_tokens=64", "train.rl.overlong={enabled: true, buffer: 64}"],
            "train.rl.overlong.buffer: must be below rollout.max_tokens: 64",
        ),
        (["sync.sections=[draft]"], "sync.sections: must contain either target or adapter"),
        (["sync.sections=[target, adapter]", "train.lora={}"], "sync.sections: must contain either target or adapter"),
        (["sync.sections=[adapter, draft]"], "sync.sections: there is no adapter without train.lora"),
        (["sync.sections=[adapter]", "train.lora={rank: 600}"], "train.lora.rank: 600 exceeds 512, the maximum of vLLM"),
        (
            ["sync.sections=[adapter]", "train.lora={rank: 4}", "rollout.engine_args.max_lora_rank=1"],
            "train.lora.rank: 4 exceeds 1, the maximum of rollout.engine_args.max_lora_rank",
        ),
        (
            ["sync.sections=[adapter]", "train.lora={}", "rollout.engine_args.enable_lora=false"],
            "sync.sections: adapter needs an engine with adapters",
        ),
        (
            ["rollout.engine_args.quantization=fp8"],
            "rollout.engine_args.quantization: the weights of a quantizing engine (fp8) cannot be synced",
        ),
        (["rollout.engine_args.pipeline_parallel_size=2"], "rollout.engine_args.pipeline_parallel_size: an engine with pipeline stages"),
        (["model.config.quantization_config={quant_method: fp8}"], "model.path: its weights are quantized"),
        (["sync.release_kv=true"], "sync.release_kv: a CPU engine cannot free its KV cache"),
        (["sync.release_kv=true", "cluster.device=auto"], "sync.release_kv: a CPU engine cannot free its KV cache"),
        (
            ["sync.release_kv=true", "cluster.device=cuda", "rollout.engine_args.enable_sleep_mode=false"],
            "sync.release_kv: needs vLLM's sleep mode",
        ),
        (["sync.kv=keep", "sync.pause=abort"], "sync.kv: with sync.pause: abort no request is in flight at a sync; set sync.pause: keep"),
        (["sync.kv=keep", "async.partial_rollout=false"], "sync.kv: with async.partial_rollout: false no request is in flight at a sync"),
        (
            ["sync.kv=keep", *GPU, "sync.release_kv=true"],
            "sync.kv: sync.release_kv frees the cache that sync.kv: keep retains; set it to false",
        ),
        ([*BITWISE, "sync.kv=keep"], "sync.kv: with keep, log-probs differ from those of the trainer, which numerics: bitwise rules out"),
        (
            ["sync.kv=keep", "rollout.engine_args.kv_transfer_config={}"],
            "rollout.engine_args.kv_transfer_config: its cache may mix weight versions with sync.kv: keep; remove it",
        ),
        (
            ["sync.kv=keep", "rollout.engine_args.kv_offloading_size=4"],
            "rollout.engine_args.kv_offloading_size: its cache may mix weight versions with sync.kv: keep; remove it",
        ),
        (["sync.bucket_bytes=256"], "sync.bucket_bytes: must be at least 1024"),
        (["data.task="], "data: there is no training data"),
        (["data.eval_path=/nowhere/e.jsonl"], "data.eval_path: "),
        (["data.task.min_digits=4", "data.task.max_digits=3"], "data.task.min_digits: must be at most max_digits: 3, got 4"),
        (["sync.transport=ipc"], "sync.transport: ipc needs CUDA; set shm"),
        (["sync.transport=storage"], "sync.url: the transport storage needs a folder; write s3://BUCKET/FOLDER"),
        (["sync.transport=storage", "sync.url=/mnt/weights"], "sync.url: /mnt/weights is not a URL; write s3://BUCKET/FOLDER"),
        (["sync.transport=ipc", "sync.delta=true"], "sync.delta: ipc copies between GPUs of one host faster than changes are found"),
        (
            ["sync.transport=nccl", "cluster.device=cuda", "logprob={standalone: true, gpus: 0.25}"],
            "sync.transport: nccl supports one process per GPU, but with logprob.gpus: 0.25 two share one; set ipc",
        ),
        (
            ["sync.transport=nccl", "cluster.device=cuda", "train.gpus=0.4", "rollout.gpus=0.4"],
            "sync.transport: nccl supports one process per GPU",
        ),
        (["model.tokenizer=/nowhere/tokenizer"], "model.tokenizer: there is no folder /nowhere/tokenizer; name a folder"),
        (["data.task=", f"data.path={__file__}", f"data.eval_path={__file__}"], "data.eval_path: equals data.path, which is trained on"),
        (["kernels.linear_logprob=triton"], "kernels.linear_logprob: triton needs a GPU; set auto"),
        ([*BITWISE, "train.precision=bf16"], "train.precision: numerics: bitwise needs fp32 on a CPU; set fp32, or numerics: default"),
        ([*BITWISE, "rollout.dtype=bf16"], "rollout.dtype: numerics: bitwise needs fp32 on a CPU; set auto, or numerics: default"),
        ([*BITWISE, "train.lora.rank=4"], "train.lora: numerics: bitwise needs full weights; remove the section"),
        ([*BITWISE, "train.parallel.cp=2"], "train.parallel.cp: numerics: bitwise does not support context parallelism, got 2; set 1"),
        (
            [*BITWISE, "rollout.tp=3", f"model.config={json.dumps(QWEN3_MOE_EAGLE3)}"],
            "rollout.tp: numerics: bitwise supports tensor parallelism of dense models only, got 3; set 1, or numerics: default",
        ),
        ([*BITWISE, "kernels.linear_logprob=reference"], "kernels.linear_logprob: numerics: bitwise needs its own kernel; set auto"),
        ([*BITWISE, "rollout.temperature=0.7"], "rollout.temperature: numerics: bitwise needs 1, got 0.7; set 1"),
        ([*BITWISE, *CORRECTED, "rollout.top_p=0.9"], "rollout.top_p: numerics: bitwise needs the whole distribution"),
        ([*BITWISE, *CORRECTED, "rollout.top_k=9"], "rollout.top_k: numerics: bitwise needs the whole distribution"),
        *(
            (
                [*BITWISE, f"rollout.engine_args={{{arg}}}"],
                f"rollout.engine_args: numerics: bitwise requires vLLM's default for {arg.split(':')[0]}; remove it",
            )
            for arg in ("dtype: half", "tensor_parallel_size: 2", "max_model_len: 16384", "model_impl: transformers", "hf_overrides: {}")
        ),
        ([*BITWISE, *GPU], "train.precision: numerics: bitwise needs bf16 on a GPU; set bf16, or numerics: default"),
        (
            [*BITWISE, *GPU, "train.precision=bf16", "rollout.dtype=fp32"],
            "rollout.dtype: numerics: bitwise needs bf16 on a GPU; set auto, or numerics: default",
        ),
        (
            [*BITWISE_GPU, "train.parallel.tp=2"],
            "train.parallel.tp: on a GPU, numerics: bitwise needs as many ranks as rollout.tp: 1, got 2; set 1",
        ),
        ([*BITWISE_GPU, "rollout.tp=4"], "rollout.tp: on a GPU, numerics: bitwise needs at most 2 ranks"),
        (
            [*BITWISE_GPU, "rollout.tp=2", "train.parallel.tp=2", "model.config.intermediate_size=200"],
            "model: on a GPU, numerics: bitwise needs multiples of 8 per rank, got MLP width 100; use such a model",
        ),
        (
            [*BITWISE_GPU, "rollout.tp=2", "train.parallel.tp=2", "model.config.num_key_value_heads=1"],
            "model: on a GPU, numerics: bitwise needs a number of ranks that divides the key-value heads, got 1 for 2 ranks",
        ),
        (
            [*BITWISE_GPU, "model.config.intermediate_size=100"],
            "model: on a GPU, numerics: bitwise needs multiples of 8, got MLP width 100; use such a model, or set numerics: default",
        ),
        ([*BITWISE, "model.config.max_position_embeddings=9000"], "rollout.context: numerics: bitwise needs at most 8192 tokens, got 9000"),
        ([*GPU, "kernels.linear_logprob=triton"], "kernels.linear_logprob: triton needs train.precision: bf16"),
        (["data.sft_path=/none.jsonl"], "data.sft_path: there is no file /none.jsonl"),
        (["data.sft_task={min_digits: 4}"], "data.sft_task.min_digits: must be at most max_digits: 3, got 4"),
        (["run_dir=runs/{nmae}"], "run_dir: {nmae} is not a placeholder"),
        (["rollout.max_tokens=4096"], "rollout.max_tokens: must leave room for a prompt in the model's positions: "),
        (["rollout.context=100000"], "rollout.context: the model has "),
        (["rollout.stop_ids=[100000000]"], "rollout.stop_ids: the model's vocabulary has "),
        (["data.system_prompt=be brief"], "data.system_prompt: needs a chat template; set data.chat_template: true"),
        (["train.parallel.tp=3"], "train.parallel.tp: 3 does not divide 4 attention heads; 1, 2, 4 fit"),
        (["train.lora.targets=[linear_qkv, q_proj]"], "train.lora.targets: no layer of mimo is a q_proj; it has linear_qkv, linear_proj, "),
        (["train.moe.aux_loss=0.01"], "train.moe.aux_loss: 0.01, but mimo has no experts; set it to 0"),
        (["train.moe.z_loss=0.01"], "train.moe.z_loss: 0.01, but mimo has no experts; set it to 0"),
        (["train.lora.targets=[]"], "train.lora.targets: must be layers, each once, got []"),
        (["train.parallel.sequence_parallel=true"], "train.parallel.sequence_parallel: splits over tensor-parallel ranks"),
        (["train.parallel.pp=5"], "train.parallel.pp: 5 stages for 4 layers; set at most 4"),
        (["train.parallel={pp: 2, pp_layout: [1, 2]}"], "train.parallel.pp_layout: must list 2 stages with 4 layers in total, got [1, 2]"),
        (["train.parallel.ep=2"], "train.parallel.ep: the model has no experts"),
        (["train.min_dp=2"], "train.min_dp: 2 is more than train.parallel.dp: 1; lower it"),
        (["logprob={standalone: true, parallel: {tp: 8}}"], "logprob.parallel.tp: 8 does not divide"),
        (["rollout.replicas={min: 3, max: 2}"], "rollout.replicas: min: 3 is more than max: 2; raise max, or lower min"),
        (
            ["rollout.replicas={min: 1, max: 2}", "async.deterministic=true"],
            "rollout.replicas: async.deterministic needs a fixed number of replicas; write a number",
        ),
        (["rollout.tp=3"], "rollout.tp: 3 does not divide 4 attention heads"),
        (["train.checkpoint_copy=s3:bucket/run"], "train.checkpoint_copy: s3:bucket/run is not a URL; write s3://BUCKET/FOLDER"),
        (
            ["train.checkpoint_copy=s3://bucket/{run}"],
            "train.checkpoint_copy: {run} is not a placeholder; only {name} and {seed} are replaced",
        ),
        (["train.checkpoint_copy=s3://bucket/run", "train.keep_checkpoints=0"], "train.checkpoint_copy: there is nothing to copy with"),
        (["cluster.address=1.2.3.4"], "cluster.address: 1.2.3.4 is not the address of a Ray cluster; write HOST:PORT"),
    ],
)
def test_invalid_combination_is_reported(sets: list[str], message: str) -> None:
    base = ["rollout.max_tokens=64", "model.config.max_position_embeddings=512"]
    complaints = [text for text in complaints_with([*base, *sets]) if message in text]
    assert complaints and complaints[0].startswith(message.split(":")[0])


HINTED = "path: policy, hint: '{answer}'"


@pytest.mark.parametrize(
    ("teacher", "sets", "message"),
    [
        ("topk: 2", [], "train.rl.teacher: set exactly one of path and url"),
        ("path: policy, url: 'http://x'", ["logprob.standalone=true"], "train.rl.teacher: set exactly one of path and url"),
        ("url: x", [], "train.rl.teacher.url: must begin with http:// or https://, got x"),
        ("path: policy", ["logprob.standalone=true"], "train.rl.teacher.hint: a policy learns nothing from itself with the same prompt"),
        (HINTED, [], "train.rl.teacher.path: policy needs the run's log-prob server; set logprob.standalone: true"),
        (
            HINTED,
            ["logprob.standalone=true", "rollout.gateway=true"],
            "train.rl.teacher.hint: an agent writes its own prompts",
        ),
        ("url: 'http://x'", ["train.rl.loss=gspo"], "train.rl.loss: gspo weights whole responses"),
        ("url: 'http://x', topk: 4", ["train.parallel.cp=2"], "train.rl.teacher.topk: needs whole responses on each rank"),
    ],
)
def test_teachers_that_do_not_fit(teacher: str, sets: list[str], message: str) -> None:
    result = [each for each in complaints_with([f"train.rl.teacher={{{teacher}}}", *sets]) if "teacher" in each]
    assert any(each.startswith(message) for each in result), result


def test_a_teachers_folder_is_read(folder: Path) -> None:
    assert not [each for each in complaints_with([f"train.rl.teacher.path={folder}"]) if "teacher" in each]
    (wrong,) = (each for each in complaints_with([f"train.rl.teacher={{path: {folder}, parallel: {{tp: 5}}}}"]) if "teacher" in each)
    assert wrong.startswith("train.rl.teacher.parallel.tp: 5 does not divide")
    with pytest.raises(UserError, match=r"train\.rl\.teacher\.path: there is no folder /no/where"):
        complaints_with(["train.rl.teacher.path=/no/where"])


def complaints_with(sets: list[str]) -> list[str]:
    return list(list_complaints(load_recipe("tiny_mtp", sets=[*SIZES, *sets]).recipe))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["cluster.device=cpu", "sync.transport=shm"], "a run on CPUs has no GPUs"),
        (["rollout.replicas={min: 1, max: 2}"], "needs a fixed number of engines"),
        (["rollout.on_trainer_gpus=2"], "2 is more than rollout.replicas: 1"),
        (["rollout.tp=2"], "an engine on a share of a GPU has one rank, but rollout.tp is 2"),
        (["train.gpus=1"], "train.gpus: 1 leaves nothing of the GPU"),
        ([], ""),
    ],
)
def test_engines_on_the_trainers_gpus_need_room_there(sets: list[str], message: str) -> None:
    complaints = complaints_with([*GPU, "sync.transport=ipc", "train.gpus=0.5", "rollout.on_trainer_gpus=1", *sets])
    assert [text.startswith(f"rollout.on_trainer_gpus: {message}") for text in complaints] == ([True] if message else [])


def test_sglang_cannot_keep_the_cache() -> None:
    sglang = load_recipe("tiny_mtp", sets=["rollout={engine: sglang}", "sync.kv=keep"]).recipe
    message = "sync.kv: keep works with rollout.engine: vllm, because the prefix cache of SGLang would keep old weights' blocks for later"
    assert [text.startswith(message) for text in list_complaints(sglang) if text.startswith("sync.kv")] == [True]


def test_bitwise_numerics_on_a_gpu_need_bf16_and_allow_long_contexts() -> None:
    sets = [*GPU, *BITWISE, "train.precision=bf16", "model.config.max_position_embeddings=9000"]
    assert not [text for text in complaints_with(sets) if "bitwise" in text]


def test_bitwise_attention_on_a_gpu_has_at_most_64_query_heads_per_key_value_head() -> None:
    heads = ["model.config.num_attention_heads=130", "model.config.num_key_value_heads=2", "model.config.head_dim=32"]
    assert complaint(*GPU, *BITWISE, "train.precision=bf16", *heads, "model.config.hidden_size=4160") == (
        "model: on a GPU, numerics: bitwise needs at most 64 attention heads per key-value head, got 65; use such a model, or set "
        "numerics: default"
    )


def test_bitwise_numerics_need_a_gpu_of_compute_capability_9_and_half_precision() -> None:
    check_gpu("NVIDIA H100 80GB HBM3", (9, 0), "bfloat16")
    fix = "use one, or set numerics: default"
    message = rf"numerics: bitwise needs a GPU of compute capability 9\.0 \(Hopper\), got NVIDIA A100 \(8\.0\); {fix}"
    with pytest.raises(UserError, match=message):
        check_gpu("NVIDIA A100", (8, 0), "bfloat16")
    with pytest.raises(UserError, match=r"got some GPU \(unknown\)"):
        check_gpu("some GPU", None, "bfloat16")
    with pytest.raises(UserError, match=r"numerics: bitwise needs bfloat16 or float16 on a GPU, got float32; set train.precision: bf16"):
        check_gpu("NVIDIA H200", (9, 0), "float32")


def test_bitwise_experts_on_a_gpu_need_aligned_widths() -> None:
    config = QWEN3_MOE_EAGLE3 | {"moe_intermediate_size": 42}
    sets = [*GPU, *BITWISE, "train.precision=bf16", f"model.config={json.dumps(config)}"]
    message = "model: on a GPU, numerics: bitwise needs multiples of 8, got experts' width 42; use such a model, or set numerics: default"
    assert [text for text in list_complaints(load_recipe("tiny_mtp", sets=sets).recipe) if "bitwise" in text] == [message]


def bitwise_complaint(config: dict[str, Any]) -> str:
    return complaint(*BITWISE, f"model.config={json.dumps(config)}", "mtp.mode=off", "rollout.speculation.num_tokens=0")


def test_bitwise_linear_attention_needs_fp32_on_a_cpu_and_aligned_widths_on_a_gpu() -> None:
    validate(load_recipe("tiny_mtp", sets=[*BITWISE, f"model.config={json.dumps(QWEN3_5)}", "train.precision=fp32"]).recipe)
    sets = [*GPU, *BITWISE, "train.precision=bf16", f"model.config={json.dumps(QWEN3_5 | {'linear_value_head_dim': 60})}"]
    message = "model: on a GPU, numerics: bitwise needs multiples of 8, got linear attention's width 180; use such a model, or set "
    assert [text for text in list_complaints(load_recipe("tiny_mtp", sets=sets).recipe) if "bitwise" in text] == [
        message + "numerics: default"
    ]


def test_bitwise_numerics_need_a_supported_model() -> None:
    validate(load_recipe("tiny_mtp", sets=[*BITWISE, "rollout.speculation.num_tokens=3", "logprob.standalone=true"]).recipe)
    validate(load_recipe("tiny_mtp", sets=[*BITWISE, "rollout.tp=3", "train.parallel={tp: 3, sequence_parallel: true}"]).recipe)
    assert bitwise_complaint(GLM4_MOE) == (
        f"model: numerics: bitwise needs a model of the family {', '.join(FAMILIES)}, got glm4-moe; use one, or set numerics: default"
    )
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
    plain = {name: value for name, value in QWEN3_EAGLE3.items() if name != "drafter"}
    assert bitwise_complaint(plain | {"rope_parameters": yarn}) == (
        "model: numerics: bitwise needs rotary embeddings of the type default, llama3, got yarn; use such a model, or set numerics: default"
    )
    assert bitwise_complaint(QWEN3_DFLASH) == (
        "model: numerics: bitwise needs a drafter with causal attention, got DFlash; use EAGLE-3 or no drafter, or set numerics: default"
    )
    experts = [f"model.config={json.dumps(QWEN3_MOE_EAGLE3)}", "train.parallel.ep=5"]
    split = "train.parallel.ep: numerics: bitwise does not support expert parallelism, got 5; set 1, or numerics: default"
    assert split in list_complaints(load_recipe("tiny_mtp", sets=[*BITWISE, *experts]).recipe)
    llama3 = {"rope_parameters": yarn | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}}
    for config in (LLAMA_EAGLE3 | llama3 | {"drafter": LLAMA_EAGLE3["drafter"] | llama3}, QWEN3_EAGLE3, QWEN3_MOE_EAGLE3):
        validate(load_recipe("tiny_mtp", sets=[*BITWISE, f"model.config={json.dumps(config)}", "rollout.speculation.num_tokens=3"]).recipe)
    sglang = load_recipe("tiny_mtp", sets=[*BITWISE, "rollout={engine: sglang}"]).recipe
    assert "rollout.engine: numerics: bitwise needs vllm; set it, or numerics: default" in list(list_complaints(sglang))


@pytest.mark.parametrize("sets", [["kernels.linear_logprob=triton"]])
def test_named_kernels_are_allowed_on_supported_devices(sets: list[str]) -> None:
    assert not complaints_with([*GPU, "train.precision=bf16", *sets])


@pytest.mark.parametrize("tokenizer", ["gpt2", "XiaomiMiMo/MiMo-7B-RL", "bytes"])
def test_hub_tokenizer_is_not_downloaded_by_checks(tokenizer: str) -> None:
    assert not complaints_with([f"model.tokenizer={tokenizer}"])


def test_notes_report_each_other_invalid_field_once() -> None:
    wrong = ["train.stages=[]", "run_dir=x/{y}", "rollout.stop_ids=[99999]", "rollout.max_tokens=100000", "rollout.context=100000"]
    with pytest.raises(UserError, match=r"^train.stages: must be draft, sft and rl") as caught:
        validate(load_recipe("tiny_mtp", sets=wrong).recipe)
    notes = caught.value.__notes__
    assert "run_dir: {y} is not a placeholder; only {name} and {seed} are replaced" in notes
    fields = [note.split(":")[0] for note in notes]
    assert len(set(fields)) == len(fields) >= 3 and "train.stages" not in fields


def test_sampling_that_renormalises_is_allowed_with_a_correction_and_without_rl() -> None:
    validate(load_recipe("tiny_mtp", sets=["rollout.top_p=0.9", "train.rl.correction.mode=truncate"]).recipe)
    validate(load_recipe("tiny_mtp", sets=["rollout.top_p=0.9", "train.stages=[sft]"]).recipe)


def test_unsyncable_engines_are_allowed_without_rl() -> None:
    sft = ["train.stages=[sft]"]
    validate(load_recipe("tiny_mtp", sets=["rollout.engine_args.quantization=fp8", *sft]).recipe)
    validate(load_recipe("tiny_mtp", sets=["sync.transport=nccl", "cluster.device=cuda", "train.gpus=0.5", *sft]).recipe)


@pytest.mark.parametrize("address", ["auto", "local", "10.0.0.1:6379", "head.example.org:6379", "ray://head:10001", "[::1]:6379"])
def test_valid_ray_addresses_are_accepted(address: str) -> None:
    validate(load_recipe("tiny_mtp", sets=[f"cluster.address='{address}'"]).recipe)


def test_names_of_special_tokens_are_no_secrets() -> None:
    validate(load_recipe("tiny_mtp", sets=["model.config.bos_token=<bos>", "model.config.eos_token_id=3"]).recipe)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 4, "sequence_parallel": True}, "train.parallel.tp: 4 does not divide 66 expert ffn width; 1, 2 fit"),
        ({"ep": 3, "dp": 3}, "train.parallel.ep: 3 does not divide 4 experts"),
        ({"ep": 4, "dp": 2}, "train.parallel.ep: 4 does not divide 2 data- and context-parallel ranks; 1, 2 fit"),
        ({"tp": 2}, "train.parallel.sequence_parallel: experts with tp: 2 need it"),
    ],
)
def test_layout_that_does_not_fit_the_experts_is_rejected(fields: dict[str, Any], message: str) -> None:
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 66}
    sets = [f"model.config.{key}={json.dumps(value)}" for key, value in {**moe, "num_nextn_predict_layers": 0}.items()]
    off = ["mtp.mode=off", "rollout.speculation.num_tokens=0", f"train.parallel={json.dumps(fields)}"]
    assert complaint(*SIZES, *sets, *off).startswith(message)


def test_stages_need_not_be_even() -> None:
    assert not complaints_with(["train.parallel.pp=3", "logprob={standalone: true, parallel: {pp: 3}}"])


def test_context_parallel_ranks_share_the_heads_of_linear_attention() -> None:
    model = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, **DELTA}
    sets = [f"model.config.{key}={json.dumps(value)}" for key, value in model.items()]
    assert complaint(*SIZES, *sets, "train.precision=bf16", "train.parallel.cp=3").startswith("train.parallel.cp: 3 does not divide")


# ------------------------------------------------------------------------------------------------- where a model is


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(load_recipe("tiny_mtp").recipe.model.config))
    (path / "model.safetensors").write_bytes(b"")
    return path


def with_folder(path: Path, *sets: str) -> list[str]:
    recipe = load_recipe("tiny_mtp", sets=["model={config: null, path: " + json.dumps(str(path)) + ", tokenizer: bytes}", *sets]).recipe
    return list(list_complaints(recipe))


def test_a_model_folder_is_read(folder: Path) -> None:
    assert with_folder(folder) == []


def test_a_folder_without_weights_is_refused_unless_they_are_drawn(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert with_folder(folder)[0].startswith(f"model.path: {folder} has no weights")
    assert with_folder(folder, "model.init=random") == []


def test_a_folder_without_a_config_or_with_a_broken_one_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{\n"a": \n}')
    with pytest.raises(UserError, match=r"config.json:3: not valid JSON"):
        with_folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match="must be a JSON object"):
        with_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config\.json"):
        with_folder(folder)


def test_a_path_that_is_neither_folder_nor_hub_id(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path: there is no folder"):
        with_folder(tmp_path / "missing")


def test_a_recipe_needs_one_model() -> None:
    with pytest.raises(UserError, match="neither is set"):
        hf_config(ModelConfig())
    with pytest.raises(UserError, match="both are set"):
        hf_config(ModelConfig(path="a/b", config={}))


def test_checks_of_hub_models_need_no_network() -> None:
    known = hf_config(ModelConfig(path="XiaomiMiMo/MiMo-7B-RL"))
    assert known is not None and known["hidden_size"] == 4096
    assert hf_config(ModelConfig(path="missing/nothing"), fetch=False) is None
    validate(load_recipe("mimo7b_mtp", sets=["model.path=missing/nothing"]).recipe)


def test_a_hub_that_does_not_answer_is_missing_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(PrerequisiteMissing, match=r"missing/nothing could not be downloaded from the hub \(no route to host\)"):
        hf_config(ModelConfig(path="missing/nothing"))


MOE = {"architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
PACKED = "model.layers.0.mlp.experts.gate_up_proj"
ALONE = ["sync.sections=[adapter, draft]", "train.lora={rank: 4, alpha: 8}"]
ON_A_CPU = "train.lora.targets: vLLM on a CPU has no adapters for experts; leave out linear_fc1 and linear_fc2, or set sync.sections: "


def with_experts(folder: Path, tensor: str, *, index: bool) -> None:
    """A folder of a model with experts, whose files name this tensor."""
    shared = {"shared_expert_intermediate_size": 64, "layer_types": ["full_attention"] * 4, "linear_conv_kernel_dim": 4}
    config = load_recipe("tiny_mtp", sets=SIZES).recipe.model.config
    (folder / "config.json").write_text(json.dumps({**(config or {}), **MOE, **DELTA, **shared, "model_type": "qwen3_5_moe_text"}))
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {tensor: "model.safetensors"}}))
        return
    header = json.dumps({tensor: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize("index", [True, False], ids=["index", "header"])
def test_adapter_of_packed_experts_is_rejected(folder: Path, index: bool) -> None:
    with_experts(folder, PACKED, index=index)
    on_a_cpu, complaint_text = sorted(with_folder(folder, *ALONE), reverse=True)
    assert on_a_cpu.startswith(ON_A_CPU)
    assert complaint_text.startswith(f"train.lora.targets: {folder} packs the experts of a layer in one tensor")
    assert complaint_text.endswith("leave out linear_fc1 and linear_fc2, or sync target instead of adapter")


def test_adapter_of_packed_experts_may_be_merged_or_omitted(folder: Path) -> None:
    with_experts(folder, PACKED, index=True)
    assert with_folder(folder, "train.lora={rank: 4, alpha: 8}") == []
    assert with_folder(folder, *ALONE, "train.lora.targets=[linear_qkv]") == []
    with_experts(folder, "model.layers.0.mlp.experts.0.gate_proj.weight", index=True)
    (complaint_text,) = with_folder(folder, *ALONE)
    assert complaint_text.startswith(ON_A_CPU), "a GPU's engine has adapters of experts"


def test_adapter_of_weights_merged_into_attention_is_rejected() -> None:
    latent = {"q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
    latent |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    }
    fields = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **latent, **experts}
    sets = [*SIZES, *(f"model.config.{key}={json.dumps(value)}" for key, value in fields.items()), *ALONE]
    complaint_text = complaint(*sets, "train.lora.targets=[linear_proj, linear_kv_up_proj]")
    assert complaint_text.startswith("train.lora.targets: linear_kv_up_proj: vLLM merges its weight into attention")
    assert list(list_complaints(load_recipe("tiny_mtp", sets=[*sets, "train.lora.targets=[linear_proj]"]).recipe)) == []


# ------------------------------------------------------------------------------------------ what engines make of a model


@pytest.mark.parametrize(("family", "dtype"), SERVED)
def test_a_toy_of_every_family_fits(family: str, dtype: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TOYS[family]))
    (tmp_path / "model.safetensors").touch()
    assert with_folder(tmp_path, f"train.precision={dtype}") == []


@pytest.mark.parametrize(
    ("family", "changes", "sets", "message"),
    [
        ("qwen3-next", {}, [], "train.precision: vLLM on a CPU computes the linear attention of qwen3-next only in bf16; set bf16"),
        (
            "qwen3-next",
            {},
            ["train.precision=bf16", "rollout.engine_args={enable_prefix_caching: true}"],
            "rollout.engine_args: vLLM on a CPU has no prefix cache for linear attention with speculation",
        ),
        (
            "nemotron-h",
            {},
            ["rollout.engine_args={enable_prefix_caching: true}"],
            "rollout.engine_args: vLLM on a CPU has no prefix cache for Mamba-2; leave enable_prefix_caching out",
        ),
        (
            "nemotron-h",
            {},
            ["rollout.engine_args={enable_prefix_caching: true}", "rollout.speculation.num_tokens=0", "mtp.mode=load"],
            "rollout.engine_args: vLLM on a CPU has no prefix cache for Mamba-2; leave enable_prefix_caching out",
        ),
        (
            "deepseek-v3",
            {"kv_lora_rank": 64},
            [],
            "model config: kv_lora_rank and qk_rope_head_dim add up to 128, but vLLM on a CPU supports",
        ),
        (
            "deepseek-v3",
            {"scoring_func": None},
            [],
            "model config: scoring_func is missing, and vLLM's default differs from what",
        ),
        ("deepseek-v3", {"topk_method": None}, ["train.precision=bf16"], "model config: topk_method is missing"),
    ],
)
def test_model_that_the_engine_does_not_support_is_rejected(
    family: str, changes: dict[str, Any], sets: list[str], message: str, tmp_path: Path
) -> None:
    config = {name: value for name, value in {**TOYS[family], **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    (complaint_text,) = with_folder(tmp_path, *sets)
    assert complaint_text.startswith(message)
    assert with_folder(tmp_path, *sets, "train.stages=[sft]") == [], "nothing is served"


def test_bitwise_accepts_linear_and_latent_attention_of_any_size_on_gpus(tmp_path: Path) -> None:
    for family in ("qwen3-next", "deepseek-v3"):
        (tmp_path / "config.json").write_text(json.dumps({**TOYS[family], **({"kv_lora_rank": 64} if family == "deepseek-v3" else {})}))
        (tmp_path / "model.safetensors").touch()
        assert with_folder(tmp_path, *GPU) == []


def test_missing_data_file_is_reported_with_closest_match(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "other.parquet", "rows.yaml"):
        (tmp_path / name).write_text("")
    assert list(check_path(f"{tmp_path}/rowz.jsonl", "data.path")) == [
        f"data.path: there is no file {tmp_path}/rowz.jsonl; did you mean {tmp_path}/rows.jsonl?"
    ]
    (complaint_text,) = check_path(f"{tmp_path}/gsm.jsonl", "data.path")
    assert complaint_text.endswith("; name a .jsonl, .json or .parquet file, a folder of them, or a dataset id (owner/name)")


@pytest.mark.parametrize(
    ("family", "sets", "message"),
    [
        (
            "qwen3.5-moe",
            [],
            "train.moe.bias_update: 0.001, but qwen3.5-moe's router has no bias; set it to 0, or use train.moe.aux_loss",
        ),
        (
            "glm4-moe",
            ["train.lora={rank: 4, targets: [linear_qkv]}"],
            "train.moe.bias_update: 0.001 would change the base weights, which train.lora freezes; set it to 0",
        ),
        ("glm4-moe", [], ""),
        ("deepseek-v3", ["train.moe.aux_loss=0.1", "train.moe.z_loss=0.1"], ""),
    ],
)
def test_bias_update_needs_router_bias_and_full_training(family: str, sets: list[str], message: str) -> None:
    recipe = load_recipe("tiny_mtp", sets=["train.moe.bias_update=0.001", *sets]).recipe
    assert next(check_moe(recipe.train, shape_of(TOYS[family])), "") == message


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["train.moe.replay=recompute", "train.rl.old_logprobs=behaviour"], "train.moe.replay: recompute has no pass to record routes"),
        (
            [*GPU, "rollout.engine=sglang", "train.moe.replay=rollout"],
            "train.moe.replay: rollout works with",
        ),
        (
            ["train.moe.replay=rollout", "rollout.engine_args={enable_prefix_caching: false}"],
            "rollout.engine_args: vLLM returns routes only with prefix caching",
        ),
    ],
)
def test_replay_without_recorded_routes_is_rejected(sets: list[str], message: str) -> None:
    assert [
        complaint_text
        for complaint_text in list_complaints(load_recipe("qwen3_5_35b_a3b_mtp", sets=sets).recipe)
        if complaint_text.startswith(message)
    ]


@pytest.mark.parametrize(("drafter", "kind"), [([EAGLE3], "an EAGLE-3"), (DFLASH, "a DFlash")])
def test_engine_that_cannot_receive_a_drafter_is_reported(drafter: list[str], kind: str) -> None:
    sets = [*drafter, "model.path=null", "model.tokenizer=bytes", "rollout.engine=sglang"]
    complaints = list_complaints(load_recipe("mimo7b_mtp", sets=sets).recipe)
    assert f"rollout.engine: sglang cannot receive {kind} drafter; set vllm" in complaints


def test_a_dense_model_has_no_routes_to_replay() -> None:
    assert complaint("train.moe.replay=rollout").startswith("train.moe.replay: rollout, but mimo has no experts")
    assert load_recipe("tiny_mtp").recipe.replay(shape_of(TOYS["mimo"])) == "off"


@pytest.mark.parametrize(
    ("sets", "replay"),
    [
        ([], "rollout"),
        (["train.moe.replay=off"], "off"),
        (["rollout.engine=sglang", "train.rl.old_logprobs=recompute"], "recompute"),
        (["rollout.engine=sglang", "train.rl.old_logprobs=behaviour"], "off"),
        (["rollout.engine_args={enable_prefix_caching: false}", "train.rl.old_logprobs=recompute"], "recompute"),
        (["train.stages=[sft]"], "off"),
    ],
)
def test_default_replay_follows_engine_and_old_logprobs(sets: list[str], replay: str) -> None:
    assert load_recipe("qwen3_5_35b_a3b_mtp", sets=sets).recipe.replay(shape_of(TOYS["qwen3.5-moe"])) == replay


VERIFIERS = ["rollout.environment=verifiers:letters", "data.task=null", "train.stages=[rl]", "reward.function=environment"]


def test_verifiers_environment_provides_problems_and_rewards() -> None:
    validate(load_recipe("tiny_mtp", sets=VERIFIERS).recipe)
    validate(load_recipe("tiny_mtp", sets=[*VERIFIERS, "data.taskset={train_size: 8, eval_size: 2}"]).recipe)
    assert load_recipe("tiny_mtp", sets=VERIFIERS).recipe.rollout.uses_agents


@pytest.mark.parametrize(
    "sets, message",
    [
        (
            [*VERIFIERS[:3]],
            "reward.function: exact has no answer to compare with, and verifiers:letters rewards its own tasks; set reward.function: env",
        ),
        (
            [*VERIFIERS[:2], VERIFIERS[3]],
            "data.sft_path: tasks of verifiers:letters have no solutions; name rows",
        ),
        ([*VERIFIERS, "rollout.gateway=true"], "rollout.environment: verifiers:letters, but an agent has its own; set single"),
        (["rollout.environment='verifiers:'", *VERIFIERS[1:]], "rollout.environment: verifiers: needs the name of an environment"),
        (
            ["rollout.environment_eval_args={taskset: {split: test}}"],
            "rollout.environment_eval_args: applies only to a verifiers environment",
        ),
        (
            ["rollout.environment='verifiers:letters'", "rollout.environment_eval_args={taskset: {split: test}}"],
            "rollout.environment_eval_args: apply to held-out tasks of the environment itself, but the problems are those of data",
        ),
        (["data.taskset={train_size: 8}"], "data.taskset: applies to rollout.environment: verifiers:NAME without data.path"),
    ],
)
def test_unsupported_settings_of_verifiers_environment_are_rejected(sets: list[str], message: str) -> None:
    assert complaint(*sets).startswith(message)


@pytest.mark.parametrize(
    "key", ["rollout.temperature", "rollout.max_turns", "rollout.max_tokens", "train.rl.clip_low", "train.max_bad_steps"]
)
def test_an_invalid_zero_is_rejected(key: str) -> None:
    with pytest.raises(UserError, match=rf"{key.replace('.', '[.]')} must be greater than 0, got 0$"):
        load_recipe("tiny_mtp", sets=[f"{key}=0"])


@pytest.mark.parametrize("key", ["async.max_staleness", "async.staleness_threshold", "mtp.loss_scale", "train.rl.kl_coef", "rollout.top_k"])
def test_explicit_zero_is_accepted(key: str) -> None:
    recipe = load_recipe("tiny_mtp", sets=[f"{key}=0"]).recipe
    validate(recipe)
    value: Any = recipe.model_dump(by_alias=True)
    for name in key.split("."):
        value = value[name]
    assert value == 0


def test_stage_draft_may_follow_others_if_it_trains_on_rows() -> None:
    sets = ["train.stages=[sft, draft, rl]", "train.draft={steps: 5, samples: 0}"]
    recipe = load_recipe("tiny_mtp", sets=sets).recipe
    validate(recipe)
    assert recipe.train.trains_on_rows and recipe.train.needs_rollout


def test_drafter_of_a_recipe_is_in_its_models_config() -> None:
    model = json.dumps({name: value for name, value in LLAMA_EAGLE3.items() if name != "drafter"})
    sets = [f"model.config={model}", "mtp.repeat=2", "rollout.speculation.num_tokens=2", *DRAFT]
    assert complaint(*sets[:1], "rollout.speculation.num_tokens=0").startswith("mtp.mode: isolated needs an MTP head")
    recipe = load_recipe("tiny_mtp", sets=[*sets, "model.drafter={}"]).recipe
    validate(recipe)
    shape = shape_of(hf_config(recipe.model) or {})
    assert shape.eagle3 is not None and shape.mtp_layers == 1
    with pytest.raises(UserError, match=r"^model\.drafter\.kind: vLLM has no MTP layers for llama; use eagle3$"):
        validate(load_recipe("tiny_mtp", sets=[*sets, "model.drafter={kind: mtp}"]).recipe)


STALE = "async.staleness_threshold=1"
ON_POLICY = "async.staleness_threshold=0"
TRUNCATE = "train.rl.correction.mode=truncate"
STALE_GRPO = [STALE, "train.rl.preset=grpo", "train.rl.minibatches=1"]


@pytest.mark.parametrize(
    ("sets", "anchor"),
    [
        ([STALE], "behaviour"),
        ([ON_POLICY], "recompute"),
        ([STALE, "async.deterministic=true"], "recompute"),
        ([ON_POLICY, "async.sync_every=2"], "behaviour"),
        ([STALE, "logprob.standalone=true"], "recompute"),
        ([STALE, TRUNCATE], "recompute"),
        ([STALE, "train.rl.loss=decoupled"], "recompute"),
        ([STALE, "train.rl.old_logprobs=recompute"], "recompute"),
        ([ON_POLICY, "train.rl.old_logprobs=behaviour"], "behaviour"),
        ([STALE, "train.rl.loss=cispo"], "behaviour"),
        ([STALE, "train.rl.loss=sapo"], "behaviour"),
        ([STALE, "train.rl.loss=cispo", TRUNCATE], "recompute"),
    ],
)
def test_recompute_of_stale_samples_without_correction_is_cautioned(sets: list[str], anchor: str) -> None:
    recipe = load_recipe("tiny_mtp", sets=sets).recipe
    validate(recipe)
    assert recipe.old_logprobs == anchor


@pytest.mark.parametrize(
    ("sets", "caution"),
    [
        ([STALE, "train.rl.old_logprobs=recompute"], "train.rl.old_logprobs: recompute, with correction.mode: off"),
        ([*STALE_GRPO, "train.rl.old_logprobs=recompute"], "train.rl.old_logprobs: recompute, with correction.mode: off"),
        ([ON_POLICY, "async.sync_every=4", "train.rl.old_logprobs=recompute"], "train.rl.old_logprobs: recompute"),
        ([STALE, "train.rl.loss=decoupled"], "train.rl.correction.mode: off leaves the importance weights"),
        ([STALE, "train.rl.loss=cispo", "train.rl.old_logprobs=recompute"], "train.rl.old_logprobs: recompute, with correction.mode: off"),
        (["train.rl.loss=gspo"], "train.rl.clip_high: 0.28 clips almost nothing with loss: gspo"),
        (["sync.delta=true", "train.precision=fp32"], "sync.delta: an update changes almost every trained element in fp32"),
        (["train.rl.advantage=reinforce_pp"], "train.rl.dynamic_sampling: drops groups of equal rewards"),
        (["train.rl.preset=sapo", "train.rl.aggregate=token"], "train.rl.aggregate: token overrides sequence of preset: sapo"),
    ],
)
def test_unstable_settings_are_cautioned(sets: list[str], caution: str) -> None:
    result = list(cautions_of(load_recipe("tiny_mtp", sets=sets).recipe))
    assert len(result) == 1 and result[0].startswith(caution) and "\n" not in result[0]


@pytest.mark.parametrize(
    "sets",
    [
        [STALE],
        [ON_POLICY, "train.rl.old_logprobs=recompute"],
        [STALE, TRUNCATE],
        [*STALE_GRPO, "train.rl.old_logprobs=recompute", TRUNCATE],
        STALE_GRPO,
        [STALE, "train.rl.loss=decoupled", TRUNCATE],
        ["train.stages=[sft]", "train.rl.old_logprobs=recompute"],
    ],
)
def test_stable_settings_have_no_caution(sets: list[str]) -> None:
    assert not list(cautions_of(load_recipe("tiny_mtp", sets=sets).recipe))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_have_no_cautions(preset: str) -> None:
    recipe = load_recipe("tiny_mtp", sets=[f"train.rl.preset={preset}", "train.rl.overlong.buffer=8"]).recipe
    validate(recipe)
    assert not list(cautions_of(recipe))


@pytest.mark.parametrize("path", list_recipes(), ids=lambda path: path.stem)
def test_included_recipes_have_no_cautions(path: Path) -> None:
    assert not list(cautions_of(load_recipe(path).recipe))


def test_commands_print_cautions(capsys: pytest.CaptureFixture[str]) -> None:
    def output_of(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--set", "train.rl.old_logprobs=recompute", "--set", "cluster.num_cpus=8"])
        assert not ended.value.code
        return capsys.readouterr().out

    assert "caution: train.rl.old_logprobs" in output_of("recipe", "validate", "tiny_mtp")
    assert len(json.loads(output_of("recipe", "validate", "tiny_mtp", "--json"))["cautions"]) == 1
    assert "caution    train.rl.old_logprobs" in output_of("train", "tiny_mtp", "--dry-run")
