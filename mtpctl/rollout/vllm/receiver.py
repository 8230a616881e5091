"""Receives weights into a live vLLM engine, as the transfer engine of vLLM's weight-update sessions.

vLLM calls it in each worker between `start_weight_update` (or `start_draft_weight_update`) and `finish_weight_update`, once for each step
of `mtpctl.sync.receiver`. The weights arrive through the transport, not through vLLM's control channel.

`LayerCapture` records the outputs of each layer for one request, for `mtpctl doctor mismatch`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from mtpctl.errors import UserError
from mtpctl.kernels import exact, invariant
from mtpctl.rollout.vllm.client import adapter_request
from mtpctl.rollout.vllm.patches import weights
from mtpctl.rollout.vllm.patches.drafter import DRAFT_TIMES
from mtpctl.rollout.vllm.patches.exact import is_bitwise
from mtpctl.sync.checksums import checksum
from mtpctl.sync.engine_target import ADAPTER, ADAPTER_ID, ZERO_ADAPTER
from mtpctl.sync.parameters import Shard, TpRank, match_shards
from mtpctl.sync.protocol import ABORTED_BY_SENDER, PlanMismatch, SectionPlan, SyncError
from mtpctl.sync.receiver import AdapterReceiver, Inbox, RankSums, SectionReceiver, StepReceiver, UpdateStep, check_fits, gpu_memory

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.lora.request import LoRARequest


@dataclass
class NoInit(WeightTransferInitInfo):
    """No initialization is needed."""


@dataclass
class Step(WeightTransferUpdateInfo):
    """An `UpdateStep` in the dataclass that vLLM requires."""

    step: UpdateStep


class ManifestTransferEngine(WeightTransferEngine[NoInit, Step]):
    """Receives sections of a manifest into the model that vLLM selected for the session."""

    init_info_cls = NoInit
    update_info_cls = Step

    def __init__(self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._steps = StepReceiver(Inbox(device))
        self._layers_with_copies: dict[nn.Module, list[nn.Module]] = {}

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Does nothing."""

    def start_weight_update(self) -> None:
        """Does nothing: a session starts with the step `begin`."""

    def receive_weights(self, update_info: Step) -> None:
        """Apply one step. Raises PlanMismatch in `begin` and SyncError in `buckets`. `abort` always raises, which ends vLLM's session."""
        step = update_info.step
        try:
            if step["action"] == "abort":
                raise SyncError(ABORTED_BY_SENDER)
            if step["action"] == "buckets":
                self._steps.receive(step)
            elif step["section"] == "adapter":
                self._steps.begin_with(step, lambda plan: self._adapter_receiver(replace(plan, config=step["config"])))
            else:
                self._steps.begin(step, self._match_shards)
        except BaseException as error:
            self._steps.fail(str(error))
            raise

    def _adapter_receiver(self, plan: SectionPlan) -> AdapterReceiver:
        previous_receiver, lora = self._steps.received.get("adapter"), self.vllm_config.lora_config
        receiver = AdapterReceiver(plan, previous=previous_receiver if isinstance(previous_receiver, AdapterReceiver) else None)
        max_rank = None if lora is None else int(lora.max_lora_rank)
        check_fits(plan, self.model, rename=weights.get_name_mapper(self.model), tp=_tp_rank(), max_rank=max_rank)
        return receiver

    def _match_shards(self, plan: SectionPlan) -> dict[str, Shard]:
        weights.check_quantization(self.vllm_config.quant_config, self.model, {entry.dtype for entry in plan.tensors().values()})
        if self.parallel_config.pipeline_parallel_size > 1:
            raise PlanMismatch("weights of an engine with pipeline stages cannot be updated in place")
        shared_with = self._default_model if self.model is not self._default_model else None
        model_dtype = self.model_config.dtype if isinstance(self.model_config.dtype, torch.dtype) else None
        return match_shards(
            self.model,
            plan,
            rename=weights.get_name_mapper(self.model),
            shared_with=shared_with,
            tp=_tp_rank(),
            dtype=model_dtype,
            plain_weight=weights.plain_weight,
            derived=weights.NOT_SYNCED,
        )

    def finish_weight_update(self) -> None:
        """Close the session's section. Raises SyncError if buckets are missing."""
        if isinstance(self._steps.finish(), SectionReceiver):
            if self.model not in self._layers_with_copies:
                self._layers_with_copies[self.model] = weights.find_layers_with_copies(self.model)
            layers = self._layers_with_copies[self.model]
            weights.repack_weights(layers)
            weights.refresh_derived_weights(layers, self.model_config.dtype)

    def write_adapter(self, folder: str) -> None:
        """Write the last received adapter to a folder, on rank 0. All ranks read it."""
        receiver = self._steps.received["adapter"]
        assert isinstance(receiver, AdapterReceiver)
        if get_tensor_model_parallel_rank() == 0:
            receiver.write(Path(folder))

    def drop_adapters(self, current_folder: str) -> None:
        """Delete all other adapter folders (rank 0 only)."""
        if get_tensor_model_parallel_rank() == 0:
            for folder in Path(current_folder).parent.iterdir():
                if folder != Path(current_folder) and folder.is_dir():
                    shutil.rmtree(folder)

    def sums(self, sections: Collection[str]) -> RankSums:
        """See `StepReceiver.sums`."""
        return self._steps.sums(sections)

    def shutdown(self) -> None:
        """Release the transport's buffers and connections."""
        self._steps.inbox.reader_cache.close()


def _tp_rank() -> TpRank:
    return TpRank(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())


class _LoraManager(Protocol):
    """The methods of vLLM's adapter manager that allocate memory for an adapter."""

    def add_dummy_lora(self, request: LoRARequest, rank: int) -> bool: ...

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int: ...


class _ModelRunner(Protocol):
    lora_manager: _LoraManager

    def get_model(self) -> torch.nn.Module: ...


class WorkerExtension:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`), for `EngineClient.rpc`."""

    weight_transfer_engine: ManifestTransferEngine
    vllm_config: VllmConfig
    model_runner: _ModelRunner
    get_draft_model: Callable[[], torch.nn.Module]
    mtpctl_capturing: LayerCapture

    def mtpctl_sums(self, *sections: str) -> RankSums:
        """This rank's part of the checksums of these sections, or of all."""
        return self.weight_transfer_engine.sums(sections)

    def mtpctl_live_sums(self) -> dict[str, str]:
        """Checksums of all live parameters, as the kernels use them. Those of the drafter begin with `draft `."""
        models = {"": self.model_runner.get_model()} | ({"draft ": self.get_draft_model()} if self.mtpctl_drafts() else {})
        return {prefix + name: checksum(tensor.data) for prefix, model in models.items() for name, tensor in model.named_parameters()}

    def mtpctl_write_adapter(self, folder: str) -> None:
        """Write the last received adapter to `folder`."""
        self.weight_transfer_engine.write_adapter(folder)

    def mtpctl_drop_adapters(self, current_folder: str) -> None:
        """Delete all adapter folders except this one."""
        self.weight_transfer_engine.drop_adapters(current_folder)

    def mtpctl_load_zero_adapter(self) -> None:
        """Load a zero-initialized adapter (see `EngineTarget.load_zero_adapter`)."""
        lora_manager = self.model_runner.lora_manager
        lora_manager.add_dummy_lora(adapter_request(ADAPTER, ADAPTER_ID, str(ZERO_ADAPTER)), lora_manager.get_dummy_lora_warmup_rank(1))

    def mtpctl_drafts(self) -> bool:
        """Whether this engine has a drafter whose weights can be updated."""
        speculative = self.vllm_config.speculative_config
        return speculative is not None and speculative.use_eagle()

    def mtpctl_verification(self) -> str:
        """The rule by which this worker verifies drafts: `block` or `token`."""
        sampler = getattr(self.model_runner, "rejection_sampler", None)
        return "block" if getattr(sampler, "use_block_verification", False) else "token"

    def mtpctl_packed_fp8(self) -> str | None:
        """The reason why this worker's FP8 weights cannot be updated in place; None if they can."""
        models = [self.model_runner.get_model(), *([self.get_draft_model()] if self.mtpctl_drafts() else [])]
        return next(filter(None, map(weights.find_packed_fp8, models)), None)

    def mtpctl_draft_s(self) -> dict[int, float]:
        """Median drafting seconds per step since the last call, by number of draft tokens."""
        return DRAFT_TIMES.take_medians()

    def mtpctl_memory(self, reset: str = "") -> dict[str, int]:
        """Memory of this worker's GPU in bytes. `reset`: reset the peaks."""
        return gpu_memory(reset=bool(reset))

    def mtpctl_capture(self, max_tokens: str) -> None:
        """Record the layers' outputs for the next request. No other request may run."""
        self.mtpctl_capturing = LayerCapture(self.model_runner.get_model(), int(max_tokens))

    def mtpctl_write_capture(self, path: str, tokens: str, temperature: str) -> None:
        """Write the recorded outputs of the request with these tokens, on rank 0. `tokens`: a JSON list."""
        rank = get_tensor_model_parallel_rank()
        self.mtpctl_capturing.write(None if rank else Path(path), json.loads(tokens), float(temperature))


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")
STREAM = "stream"
"""Suffix of the name of a norm's residual stream."""
FINAL, OUTPUT = "final_norm", "output"


class LayerCapture:
    """Records the outputs of attention, MLP and norms of each layer, by hooks that are active from construction until `write`.

    Requires eager mode. Attention has no hook, because its signature differs between models: its output is the input of the layer's second
    norm. The output of the MLP is the first output of the layer.

    Rows are stored by the position of their token. A later step overwrites a position, so a rejected draft is replaced by the token that
    was sampled there.
    """

    def __init__(self, model: nn.Module, max_tokens: int) -> None:
        """`max_tokens`: number of positions, including rejected drafts. Raises UserError for a model whose layers have other norms."""
        self._model: Any = model
        self._max_tokens = max_tokens
        self._rows: dict[str, Tensor] = {}
        self._num_tokens = 0
        self._positions: Tensor | None = None  # of the rows in the current forward pass
        self._norm_was_called = False
        layers = {int(match[1]): (name, module) for name, module in model.named_modules() if (match := _LAYER.search(name))}
        if not layers or any(not hasattr(layer, "post_attention_layernorm") for _, layer in layers.values()):
            raise UserError(f"model: {type(model).__name__} has layers whose modules mtpctl cannot compare")
        self._handles = [model.register_forward_pre_hook(self._begin, with_kwargs=True), model.register_forward_hook(self._end)]
        for number, (_, layer) in sorted(layers.items()):
            self._hook_norm(layer.get_submodule("input_layernorm"), f"{number}.norm1", source="embedding" if number == 0 else None)
            self._hook_norm(layer.get_submodule("post_attention_layernorm"), f"{number}.norm2", source=f"{number}.attention")
            self._handles.append(layer.register_forward_hook(self._layer_hook(f"{number}.mlp")))
        self._final_norm = model.get_submodule(layers[0][0].removesuffix("layers.0") + "norm")
        self._hook_norm(self._final_norm, FINAL)

    def _hook_norm(self, norm: nn.Module, name: str, *, source: str | None = None) -> None:
        """Record the norm's output and residual stream, and with `source` its input, as the output of the module `source`."""
        if source is not None:
            self._handles.append(norm.register_forward_pre_hook(self._input_hook(source)))
        self._handles.append(norm.register_forward_hook(self._norm_hook(name)))

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        positions = (positions[0] if positions.dim() > 1 else positions).cpu()
        # The request's rows have consecutive positions. The rows after a gap are padding.
        gaps = (positions[1:] != positions[:-1] + 1).nonzero()
        count = int(gaps[0]) + 1 if len(gaps) else len(positions)
        self._positions = positions[:count]
        self._num_tokens = max(self._num_tokens, int(self._positions[-1]) + 1)
        self._norm_was_called = False

    def _end(self, _: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Any, ...]) -> None:
        output = output[0] if isinstance(output, tuple) else output
        self._store(OUTPUT, output)
        if not self._norm_was_called:  # MiMo's model returns the stream; its LM head applies the norm.
            self._final_norm(output)
        self._positions = None

    def _input_hook(self, source: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def record(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            # The input is recorded before the norm runs, because fused norms overwrite their inputs.
            self._store(source, args[0])

        return record

    def _layer_hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], tuple[Tensor, Tensor]], None]:
        return lambda _, args, output: self._store(name, output[0])

    def _norm_hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor | tuple[Tensor, Tensor]], None]:
        def record(_: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, Tensor]) -> None:
            # A norm without a residual returns only its output; the residual stream is its input.
            norm_output, residual = output if isinstance(output, tuple) else (output, args[0])
            self._norm_was_called |= name == FINAL
            self._store(name, norm_output)
            self._store(f"{name}.{STREAM}", residual)

        return record

    def _store(self, name: str, rows: Tensor) -> None:
        if self._positions is None:  # The LM head applies MiMo's final norm to some of the rows.
            return
        if name not in self._rows:
            self._rows[name] = torch.zeros(self._max_tokens, rows.shape[-1], dtype=rows.dtype)
        self._rows[name][self._positions] = rows[: len(self._positions)].detach().to("cpu", copy=True)

    @torch.no_grad()
    def write(self, path: Path | None, tokens: list[int], temperature: float) -> None:
        """Remove the hooks, and write the rows of all `tokens` except the last one, for which the model did not run.

        Also writes the log-prob of each token after the first, computed from the model's output, and the largest absolute logit by
        position. If `path` is None, computes the log-probs with the other ranks, and writes nothing.
        """
        for handle in self._handles:
            handle.remove()
        count = len(tokens) - 1
        if self._num_tokens < count:
            raise RuntimeError(f"the engine computed {self._num_tokens} of {count} tokens")
        rows = {name: rows_of_layer[:count].clone() for name, rows_of_layer in self._rows.items()}
        device = next(self._model.parameters()).device
        logits: Tensor = self._model.compute_logits(rows.pop(OUTPUT).to(device)).float() / temperature
        rows["logit_scale"] = logits.abs().amax(-1).cpu()
        labels = torch.tensor(tokens[1:], device=device)
        exact_log_softmax = invariant.log_softmax if logits.is_cuda else exact.log_softmax
        log_softmax = exact_log_softmax if is_bitwise() else partial(torch.log_softmax, dim=-1)
        rows["logprob"] = log_softmax(logits).gather(-1, labels[:, None]).squeeze(-1).cpu()
        if path is not None:
            save_file(rows, path)
