"""Drafting in vLLM (vLLM 0.32.0): a scheduler for `speculation.auto`, steps without drafts, drafting times, and MTP layers by depth.

vLLM can draft fewer tokens for larger batches, by a table that is fixed at the start (`num_speculative_tokens_per_batch_size`). The
scheduler here (`scheduler_cls`) replaces the table before each step with one whose entries are all the number that a `SpeculationSwitch`
has chosen.
"""

from __future__ import annotations

import inspect
import logging
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

from mtpctl.errors import UpstreamMoved
from mtpctl.families.reading import mtp_layers_of
from mtpctl.rollout.protocol import SpeculationState
from mtpctl.rollout.switch import Choice, SpeculationSwitch, Step
from mtpctl.rollout.vllm.patches import assign, patch

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
    from vllm.model_executor.models.mimo_mtp import MiMoMTP
    from vllm.model_executor.models.mimo_v2_mtp import MiMoV2MultiTokenPredictor
    from vllm.sequence import IntermediateTensors
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_UPSTREAM_OVERRIDE = "_mtpctl_hf_config_override"
"""Attribute of vLLM's `SpeculativeConfig` that stores the original `hf_config_override`."""

STEP_TIMES = 512
"""Number of recent steps whose times are stored, for each number of drafts."""
DRAFTING_TIMES = 256
"""Number of recent steps whose drafting times are stored, for each number of drafts."""

log = logging.getLogger("vllm.mtpctl")  # a child of vLLM's logger, which is configured in every process of an engine


class Drafter(Protocol):
    """A drafter of either of vLLM's model runners."""

    speculative_config: SpeculativeConfig
    device: torch.device


class DrafterV1(Drafter, Protocol):
    """A drafter of the first model runner."""

    num_speculative_tokens: int
    _last_draft_probs: torch.Tensor | None


class DrafterV2(Drafter, Protocol):
    """A drafter of the second model runner; `draft_tokens` is its buffer `[requests, drafts]`."""

    draft_tokens: torch.Tensor


Propose = Callable[..., torch.Tensor]
"""A drafter's `propose`; the two model runners pass different arguments."""


# ------------------------------------------------------------------------------------------------------------ scheduler


class SwitchingScheduler(Scheduler):
    """Gets the number of drafts from the switch before each step, and reports the step's time and accepted drafts to it."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: StructuredOutputManager,
        block_size: int,
        hash_block_size: int | None = None,
        *,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        super().__init__(
            vllm_config,
            kv_cache_config,
            structured_output_manager,
            block_size,
            hash_block_size,
            include_finished_set=include_finished_set,
            log_stats=log_stats,
        )
        assert self.dynamic_sd_lookup is not None, "the settings contain a schedule of draft tokens"
        self.switch = SpeculationSwitch(self.num_spec_tokens, self._log_choice)
        size = len(self.dynamic_sd_lookup)
        self._tables = [[drafts] * size for drafts in range(self.num_spec_tokens + 1)]
        self._last_step: tuple[float, int] | None = None
        self._last_choice = ""
        self._steps: Counter[int] = Counter()
        self._step_s: dict[int, deque[float]] = defaultdict(partial(deque, maxlen=STEP_TIMES))

    def _log_choice(self, choice: Choice) -> None:
        self._last_choice = str(choice)
        log.warning("%s", choice)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step with the switch's number of drafts."""
        drafts = self.switch.next_drafts()
        self._steps[drafts] += 1
        self.dynamic_sd_lookup = self._tables[drafts]
        return super().schedule(throttle_prefills)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """Report the step to the switch, and process its output."""
        self._observe(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _observe(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Report a step to the switch if this step and the one before it only decoded, with the same number of drafts."""
        now = time.perf_counter()
        requests = len(scheduled.num_scheduled_tokens)
        drafts = scheduled.num_spec_tokens_to_schedule
        # This runs between steps, for hundreds of requests: sets and counters are faster than a loop.
        num_drafting = sum(map(bool, scheduled.scheduled_spec_decode_tokens.values()))
        decodes_only = set(scheduled.num_scheduled_tokens.values()) == {1 + drafts} and num_drafting == (requests if drafts else 0)
        previous_step, self._last_step = self._last_step, (now, drafts) if decodes_only else None
        if not decodes_only or previous_step is None or previous_step[1] != drafts:
            return
        lengths = Counter(map(len, output.sampled_token_ids))
        accepted = tuple(sum(count for length, count in lengths.items() if length > position + 1) for position in range(drafts))
        self._step_s[drafts].append(now - previous_step[0])
        self.switch.observe(Step(requests, drafts, now - previous_step[0], accepted))

    def control_speculation(self, drafts: int | None, weights_changed: bool) -> SpeculationState:
        """Fix the number of drafts (None: unchanged; negative: automatic), and return the state. Resets its `steps` and `step_s`.

        `weights_changed`: see `SpeculationSwitch.on_weight_update`.
        """
        if drafts is not None:
            self.switch.fix_drafts(None if drafts < 0 else drafts)
        if weights_changed:
            self.switch.on_weight_update()
        steps = dict(self._steps)
        step_s = {number: statistics.median(seconds) for number, seconds in self._step_s.items()}
        self._steps.clear()
        self._step_s.clear()
        return {
            "steps": steps,
            "step_s": step_s,
            "drafts": self.switch.next_drafts(),
            "in_trial": self.switch.in_trial,
            "trials": self.switch.trials,
            "switches": self.switch.switches,
            "message": self._last_choice,
        }


class AsyncSwitchingScheduler(SwitchingScheduler, AsyncScheduler):
    """`SwitchingScheduler` for engines that schedule a step while the previous one runs."""


# ------------------------------------------------------------------------------------------------- steps without drafts


@patch
def install_drafter() -> None:
    """Skip the drafter in steps without drafts, and time it in the others (`EngineCore.mtpctl_speculation` returns the times).

    vLLM runs its drafter even if a step requests no draft tokens, to keep the drafter's KV cache complete. With a large vocabulary the
    drafter takes a tenth of the step, so an engine that has switched speculation off would be slower than one that never speculates. If the
    drafter is skipped, the tokens of the step have no entries in its cache, and drafts of running requests are accepted less often after
    drafting resumes. The output distribution is unaffected, because the target verifies.

    The first model runner, which CPUs use, also runs the rejection sampler in such a step, which takes three times as long as plain
    sampling. With the patch it uses plain sampling.
    """
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    assign(EngineCore, mtpctl_speculation=_control_speculation)
    _patch_propose(SpecDecodeBaseProposer, _make_empty_drafts)
    _patch_sample()
    if HAS_TRITON:
        from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

        for speculator in (MultiModuleMTPSpeculator, TargetDependentARSpeculator):
            _patch_propose(speculator, _mark_drafts_empty)


def _control_speculation(self: EngineCore, drafts: int | None, weights_changed: bool) -> SpeculationState:
    """`SwitchingScheduler.control_speculation`, with the drafting times of rank 0 since the last call."""
    state = cast(SwitchingScheduler, self.scheduler).control_speculation(drafts, weights_changed)
    times: list[dict[int, float]] = self.model_executor.collective_rpc("mtpctl_draft_s")
    return {**state, "draft_s": times[0]}


def _patch_propose(owner: type, make_empty_drafts: Propose) -> None:
    """Make `owner.propose` call `make_empty_drafts` in steps that request no drafts, and time all other steps."""
    upstream: Propose = vars(owner)["propose"]
    if "num_speculative_tokens" not in inspect.signature(upstream).parameters:
        raise UpstreamMoved(f"{__name__}: {owner.__name__}.propose no longer takes num_speculative_tokens; find the new way to skip it")

    @wraps(upstream)
    def propose(self: Drafter, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = kwargs.get("num_speculative_tokens")
        is_dynamic = self.speculative_config.uses_dynamic_speculative_decoding()
        if not is_dynamic or drafts is None or kwargs.get("dummy_run") or kwargs.get("is_profile"):
            return upstream(self, *args, **kwargs)
        if drafts == 0:
            return make_empty_drafts(self, *args, **kwargs)
        end = DRAFT_TIMES.begin(drafts, self.device)
        result = upstream(self, *args, **kwargs)
        end()
        return result

    assign(owner, propose=propose)


def _patch_sample() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    upstream = GPUModelRunner._sample
    if list(inspect.signature(upstream).parameters) != ["self", "logits", "spec_decode_metadata"]:
        raise UpstreamMoved(f"{__name__}: GPUModelRunner._sample takes other arguments; find the new way to sample without drafts")

    def sample(self: GPUModelRunner, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        no_drafts = spec_decode_metadata is not None and spec_decode_metadata.max_spec_len == 0
        return upstream(self, logits, None if no_drafts else spec_decode_metadata)

    assign(GPUModelRunner, _sample=sample)


def _make_empty_drafts(self: DrafterV1, *_: object, common_attn_metadata: CommonAttentionMetadata, **__: object) -> torch.Tensor:
    """The first model runner's form of no draft tokens: a tensor `[requests, 0]`."""
    self.num_speculative_tokens = 0
    self._last_draft_probs = None
    return torch.empty(common_attn_metadata.batch_size(), 0, device=self.device, dtype=torch.int64)


def _mark_drafts_empty(self: DrafterV2, input_batch: InputBatch, *_: object, **__: object) -> torch.Tensor:
    """The second model runner's form of no draft tokens: its buffer `[requests, limit]`, filled with -1."""
    return self.draft_tokens[: input_batch.num_reqs].fill_(-1)


class DraftTimes:
    """Seconds of drafting per step, by number of drafts.

    On a GPU, CUDA events before and after the drafter measure it, including idle gaps between kernels. Only `take_medians` reads the
    events, and only completed ones, so no step waits for them.
    """

    def __init__(self) -> None:
        self._readers: dict[int, deque[Callable[[], float | None]]] = defaultdict(partial(deque, maxlen=DRAFTING_TIMES))

    def begin(self, drafts: int, device: torch.device) -> Callable[[], None]:
        """Call at the start of drafting; returns the function to call at its end."""
        if device.type == "cuda":
            start_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start_event.record()

            def end() -> None:
                end_event.record()
                self._readers[drafts].append(lambda: start_event.elapsed_time(end_event) / 1e3 if end_event.query() else None)

        else:
            started_at = time.perf_counter()

            def end() -> None:
                seconds = time.perf_counter() - started_at
                self._readers[drafts].append(lambda: seconds)

        return end

    def take_medians(self) -> dict[int, float]:
        """Return the median by number of drafts, and reset."""
        times = {drafts: [seconds for read in readers if (seconds := read()) is not None] for drafts, readers in self._readers.items()}
        self._readers.clear()
        return {drafts: statistics.median(samples) for drafts, samples in times.items() if samples}


DRAFT_TIMES = DraftTimes()
"""Times of this process's drafter."""


# --------------------------------------------------------------------------------------------------- MTP layers by depth


@patch
def install_depths() -> None:
    """Make drafters with several MTP layers run the layer of each depth.

    The second model runner, which GPUs use, drafts each token of a step with the layer `spec_step_idx`. Two drafters ignore it:

    - `MiMoMTP` asserts that the depth is the first, though it has the other layers.
    - `DeepSeekMTP` is compiled once, for the first depth it is called with, and without guards: the compiled code would run that depth's
      layer for all depths. The symptom is an acceptance of later drafts far below what the trainer expects.

    With the patch MiMo runs the requested layer, and DeepSeek runs later depths without the compiled code; in decoding steps they are part
    of the drafter's CUDA graph as before.
    """
    from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
    from vllm.model_executor.models.mimo_mtp import MiMoMTP

    if _takes_later_depths(MiMoMTP.forward):
        raise UpstreamMoved(f"{__name__}: MiMoMTP takes later depths by itself; remove this part of the patch")
    compiled_call: Callable[..., Any] | None = vars(DeepSeekMTP).get("__call__")
    if compiled_call is None:
        raise UpstreamMoved(f"{__name__}: DeepSeekMTP is no longer compiled as a whole; remove this part of the patch")

    def forward(
        self: MiMoMTP,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        return self.model(input_ids, positions, hidden_states, inputs_embeds, spec_step_idx)  # type: ignore[no-any-return]

    @wraps(compiled_call)
    def call(self: DeepSeekMTP, *args: Any, **kwargs: Any) -> Any:
        run = self.forward if kwargs.get("spec_step_idx") else compiled_call.__get__(self)
        return run(*args, **kwargs)

    assign(MiMoMTP, forward=forward)
    assign(DeepSeekMTP, __call__=call)


@patch
def install_mimo_v2_layers() -> None:
    """Load all MTP layers of MiMo-V2-Flash, and run the layer of each depth.

    The published model has three. vLLM builds only the first, drafts every token with it, and skips the weights of the others. The symptoms
    are a weight update with tensors that the drafter does not have, and later drafts that are accepted less often than the trainer expects.

    With the patch the drafter has the number of layers in the config, or three if the config has no number, like the published one.
    `MiMoV2MTP` already selects the layer of the requested depth. The first model runner, which CPUs use, drafts with the first layer only,
    and supports only drafters whose layers share one KV-cache group. There the other layers have weights but no cache.
    """
    from vllm.config import SpeculativeConfig
    from vllm.model_executor.models import mimo_v2_mtp
    from vllm.platforms import current_platform

    predictor = mimo_v2_mtp.MiMoV2MultiTokenPredictor
    if mimo_v2_mtp._MIMO_V2_FLASH_NUM_MTP_LAYERS != 1:
        raise UpstreamMoved(f"{__name__}: vLLM serves several MTP layers of MiMo-V2-Flash; remove the patch")
    upstream_init = predictor.__init__

    def init(self: MiMoV2MultiTokenPredictor, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        upstream_init(self, vllm_config=vllm_config, prefix=prefix)
        assert vllm_config.speculative_config is not None
        config = vllm_config.speculative_config.draft_model_config.hf_config
        name = f"{prefix}.mtp.layers".removeprefix(".")
        for layer in range(self.num_mtp_layers, config.num_nextn_predict_layers):
            self.mtp.layers[str(layer)] = mimo_v2_mtp.MiMoV2MTPLayer(
                config, f"{name}.{layer}", vllm_config.cache_config, vllm_config.quant_config
            )
            if current_platform.is_cpu():
                del vllm_config.compilation_config.static_forward_context[f"{name}.{layer}.self_attn.attn"]
        self.num_mtp_layers = len(self.mtp.layers)

    assign(SpeculativeConfig, **{_UPSTREAM_OVERRIDE: SpeculativeConfig.hf_config_override})
    assign(SpeculativeConfig, hf_config_override=staticmethod(with_mimo_v2_layers))
    assign(predictor, __init__=init)


def with_mimo_v2_layers(hf_config: PretrainedConfig) -> PretrainedConfig:
    """Return vLLM's config of a drafter, with the number of MTP layers of MiMo-V2-Flash. It is at module level because vLLM pickles it."""
    from vllm.config import SpeculativeConfig

    is_target = "MiMoV2FlashForCausalLM" in (hf_config.architectures or [])
    layers = mtp_layers_of(hf_config.to_dict()) if is_target else 0
    # The patch may not be installed in a process that only unpickles configs.
    upstream = getattr(SpeculativeConfig, _UPSTREAM_OVERRIDE, SpeculativeConfig.hf_config_override)
    result: PretrainedConfig = upstream(hf_config)
    if layers:
        result.update({"n_predict": layers, "num_nextn_predict_layers": layers})
    return result


def _takes_later_depths(forward: Callable[..., Any]) -> bool:
    """Whether the drafter's `forward` accepts the second depth (with a model that returns nothing)."""
    drafter = SimpleNamespace(model=lambda *_: None)
    try:
        forward(drafter, None, None, None, spec_step_idx=1)
    except AssertionError:
        return False
    return True
