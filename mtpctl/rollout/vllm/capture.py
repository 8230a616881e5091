"""Records the inputs and outputs of a vLLM model's layers for one request, in eager mode.

Most hooks are on norms. vLLM passes a layer's second norm the attention's output and the residual stream, and a layer returns the MLP's
output and the stream, whatever the signatures of attention and MLP.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mtpctl.errors import UserError
from mtpctl.kernels import exact, invariant
from mtpctl.rollout.vllm.patches.exact import is_exact

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")
STREAM = "stream"
"""Suffix of the names of the residual stream that a norm reads."""
FINAL, OUTPUT = "final_norm", "output"


class LayerCapture:
    """Hooks on the layers of a model, from construction until `write`.

    Rows are stored by the position of their token. A later step overwrites a position, so a rejected draft is replaced by the token that
    was sampled there.
    """

    def __init__(self, model: nn.Module, positions: int) -> None:
        """positions: maximum number of tokens. Raises UserError for a model whose layers have other norms."""
        self._model: Any = model
        self._limit = positions
        self._rows: dict[str, Tensor] = {}
        self._count = 0
        self._positions: Tensor | None = None  # of the rows in the current forward pass
        self._has_normed = False
        layers = {int(match[1]): (name, module) for name, module in model.named_modules() if (match := _LAYER.search(name))}
        if not layers or any(not hasattr(layer, "post_attention_layernorm") for _, layer in layers.values()):
            raise UserError(f"model: {type(model).__name__} has layers whose modules mtpctl cannot compare")
        self._handles = [model.register_forward_pre_hook(self._begin, with_kwargs=True), model.register_forward_hook(self._end)]
        for number, (_, layer) in sorted(layers.items()):
            self._hook_norm(layer.get_submodule("input_layernorm"), f"{number}.norm1", source="embedding" if number == 0 else None)
            self._hook_norm(layer.get_submodule("post_attention_layernorm"), f"{number}.norm2", source=f"{number}.attention")
            self._handles.append(layer.register_forward_hook(self._layer_writer(f"{number}.mlp")))
        self._final_norm = model.get_submodule(layers[0][0].removesuffix("layers.0") + "norm")
        self._hook_norm(self._final_norm, FINAL)

    def _hook_norm(self, norm: nn.Module, name: str, *, source: str | None = None) -> None:
        """Record the norm's output and the stream that it reads; its first argument too, as the output of `source`."""
        if source is not None:
            self._handles.append(norm.register_forward_pre_hook(self._reader(source)))
        self._handles.append(norm.register_forward_hook(self._writer(name)))

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        positions = (positions[0] if positions.dim() > 1 else positions).cpu()
        # Rows after the request's tokens are padding.
        steps = (positions[1:] != positions[:-1] + 1).nonzero()
        count = int(steps[0]) + 1 if len(steps) else len(positions)
        self._positions = positions[:count]
        self._count = max(self._count, int(self._positions[-1]) + 1)
        self._has_normed = False

    def _end(self, _: nn.Module, args: tuple[Any, ...], out: Tensor | tuple[Any, ...]) -> None:
        out = out[0] if isinstance(out, tuple) else out
        self._store(OUTPUT, out)
        if not self._has_normed:  # MiMo's model returns the stream; its LM head applies the norm.
            self._final_norm(out)
        self._positions = None

    def _reader(self, source: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def read(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            # Before the norm: fused norms overwrite their inputs.
            self._store(source, args[0])

        return read

    def _layer_writer(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], tuple[Tensor, Tensor]], None]:
        return lambda _, args, out: self._store(name, out[0])

    def _writer(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor | tuple[Tensor, Tensor]], None]:
        def write(_: nn.Module, args: tuple[Tensor, ...], out: Tensor | tuple[Tensor, Tensor]) -> None:
            # Without a residual, the stream is the input itself.
            normed, stream = out if isinstance(out, tuple) else (out, args[0])
            self._has_normed |= name == FINAL
            self._store(name, normed)
            self._store(f"{name}.{STREAM}", stream)

        return write

    def _store(self, name: str, rows: Tensor) -> None:
        if self._positions is None:  # The LM head applies MiMo's final norm to some of the rows.
            return
        if name not in self._rows:
            self._rows[name] = torch.zeros(self._limit, rows.shape[-1], dtype=rows.dtype)
        self._rows[name][self._positions] = rows[: len(self._positions)].detach().to("cpu", copy=True)

    @torch.no_grad()
    def write(self, path: Path | None, tokens: list[int], temperature: float) -> None:
        """Remove the hooks and write all rows of `tokens` except the last one, which has none; only the LM head runs if `path` is None.

        Also writes the log-prob of each token after the first, computed from the model's output, and the largest logit by position.
        """
        for handle in self._handles:
            handle.remove()
        count = len(tokens) - 1
        if self._count < count:
            raise RuntimeError(f"the engine computed {self._count} of {count} tokens")
        rows = {name: values[:count].clone() for name, values in self._rows.items()}
        device = next(self._model.parameters()).device
        logits: Tensor = self._model.compute_logits(rows.pop(OUTPUT).to(device)).float() / temperature
        rows["logit_scale"] = logits.abs().amax(-1).cpu()
        labels = torch.tensor(tokens[1:], device=device)
        bitwise = invariant.log_softmax if logits.is_cuda else exact.log_softmax
        log_softmax = bitwise if is_exact() else partial(torch.log_softmax, dim=-1)
        rows["logprob"] = log_softmax(logits).gather(-1, labels[:, None]).squeeze(-1).cpu()
        if path is not None:
            save_file(rows, path)
