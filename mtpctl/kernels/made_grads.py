"""Gradients that a forward pass has made already, for an upstream gradient that the caller stated beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mtpctl.kernels.call import WeightSink


@dataclass
class MadeGrads:
    """The gradients of the states, where that of the weight was written, the upstream gradient that both were made for, and a check to run
    before they are used."""

    hidden: list[Tensor | None]
    sink: WeightSink
    expected: float
    check: Callable[[], None]

    def given(self, came: float) -> tuple[list[Tensor | None], Tensor | None]:
        """What the backward pass returns for the states and the weight, the upstream gradient being `came`.

        Where that is another than expected they are rescaled. Raises ValueError where they cannot be: they are in `main_grad` already, or
        were made for 0.
        """
        self.check()
        if not math.isclose(came, self.expected, rel_tol=1e-6):
            why = "main_grad has been added to already" if self.sink.shared else "" if self.expected else "no factor leads there"
            if why:
                raise ValueError(f"grad_scale: {self.expected}, but the loss received a gradient of {came}; {why}")
            for x in (*self.hidden, self.sink.out):
                if x is not None:
                    x.mul_(came / self.expected)
        return self.hidden, self.sink.finish()
