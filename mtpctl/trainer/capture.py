"""Records the outputs of the trainer's modules for one sequence, with their own inputs or with those of another engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from mtpctl.model.gpt import MtpModel
from mtpctl.model.layers import LayerNormColumnParallelLinear

Rows = dict[str, Tensor]


@contextmanager
def captured(model: MtpModel, inputs: Mapping[str, Tensor] | None = None) -> Iterator[Rows]:
    """Record the module outputs of the forward pass in this block, by the names of `mtpctl.rollout.vllm.receiver`.

    inputs: residual streams of the sequence's first tokens that replace those of this model, so that every module reads the same input as
    in the engine that recorded them, and the output of the final norm, which replaces this model's.
    """
    capture = _Capture(inputs or {})
    try:
        capture.install(model)
        yield capture.rows
    finally:
        for handle in capture.handles:
            handle.remove()


class _Capture:
    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self.inputs, self.rows = inputs, Rows()
        self.handles: list[torch.utils.hooks.RemovableHandle] = []

    def install(self, model: MtpModel) -> None:
        for layer in model.decoder.layers:
            number = layer.layer_number - 1
            self.handles.append(layer.register_forward_pre_hook(self._enter(number), with_kwargs=True))
            self._norm(f"{number}.norm1", layer.input_layernorm, layer.self_attention)
            self._output(f"{number}.attention", layer.self_attention)
            self.handles.append(layer.pre_mlp_layernorm.register_forward_pre_hook(self._replace(f"{number}.norm2.stream")))
            self._norm(f"{number}.norm2", layer.pre_mlp_layernorm, layer.mlp)
            self._output(f"{number}.mlp", layer.mlp)
        final = model.decoder.final_layernorm
        self.handles.append(final.register_forward_pre_hook(self._replace("final_norm.stream")))
        self._output("final_norm", final)
        self.handles.append(final.register_forward_hook(lambda module, args, out: self._merged("final_norm", out)))

    def _enter(self, number: int) -> Any:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            stream = args[0] if args else kwargs["hidden_states"]
            if number == 0:
                self._store("embedding", stream)
            stream = self._merged(f"{number}.norm1.stream", stream)
            return (stream, *args[1:]) if args else (), kwargs if args else kwargs | {"hidden_states": stream}

        return enter

    def _replace(self, name: str) -> Any:
        return lambda module, args: (self._merged(name, args[0]), *args[1:])

    def _norm(self, name: str, norm: nn.Module, module: nn.Module) -> None:
        """Record a norm's output. Most layers fuse their norm with the linear layer that follows."""
        if not isinstance(norm, IdentityOp):
            self._output(name, norm)
            return
        linear = next(child for child in module.children() if isinstance(child, LayerNormColumnParallelLinear))
        self.handles.append(linear.register_forward_pre_hook(lambda fused, args: self._store(name, fused._norm(args[0]))))

    def _output(self, name: str, module: nn.Module) -> None:
        def store(_: nn.Module, args: tuple[Any, ...], out: Tensor | tuple[Tensor, Tensor | None]) -> None:
            if isinstance(out, tuple):
                out = out[0] if out[1] is None else out[0] + out[1]
            self._store(name, out)

        self.handles.append(module.register_forward_hook(store))

    def _store(self, name: str, rows: Tensor) -> None:
        self.rows[name] = rows.detach().flatten(0, -2).to("cpu", copy=True)

    def _merged(self, name: str, rows: Tensor) -> Tensor:
        """`rows`, of which the first ones are replaced by the inputs of this name."""
        if name not in self.inputs:
            return rows
        inputs = self.inputs[name]
        merged = rows.clone()
        merged.view(-1, rows.shape[-1])[: len(inputs)] = inputs.to(rows)
        return merged
