"""What PyTorch passes to an autograd function as `ctx`, typed as far as it is used here."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AutogradContext(Protocol):
    """A function's own protocol adds the attributes that its forward pass leaves for its backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...
