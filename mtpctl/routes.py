"""Routes: the expert choices of the inference engine for each token, which the trainer replays.

Routes are an array `[tokens, layers, k]` of expert indices, uint8 for up to 256 experts, else uint16. `tokens` are the leading tokens of
prompt and response: a token gets its row when the next token is sampled, so the last token never has one. The trainer's router decides for
tokens without a row. `layers` are the MoE decoder layers in order, without MTP layers, whose routing is not replayed.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtpctl.families.shape import ModelShape

if TYPE_CHECKING:
    # Processes that do not use routes, such as reward workers, start without numpy.
    import numpy as np
    import numpy.typing as npt

type Routes = npt.NDArray[np.unsignedinteger[Any]]
"""`[tokens, layers, k]`, uint8 or uint16."""


@dataclass(frozen=True, slots=True)
class RouteShape:
    """The format of a model's routes: the indices of its MoE decoder layers, k, and the number of experts of a layer."""

    layers: tuple[int, ...]
    per_token: int
    experts: int

    @classmethod
    def of(cls, shape: ModelShape) -> RouteShape | None:
        """The format for a model; None for a dense model."""
        moe = shape.moe
        if moe is None:
            return None
        layers = tuple(layer for layer in range(shape.layers) if shape.mlp_of(layer) == "sparse")
        return cls(layers, moe.experts_per_token, moe.experts)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest dtype for the expert indices."""
        import numpy as np

        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    @property
    def token_bytes(self) -> int:
        return len(self.layers) * self.per_token * self.dtype.itemsize

    def fault(self, routes: Routes, tokens: int) -> str | None:
        """Why `routes` are invalid for a sequence of `tokens` tokens; None if they are valid."""
        import numpy as np

        if routes.ndim != 3 or routes.dtype.kind != "u":
            return f"routes are {routes.dtype} with {routes.ndim} dimensions, but must be {self.dtype} [tokens, layers, experts per token]"
        rows, layers, per_token = routes.shape
        if layers != len(self.layers):
            return f"routes have {layers} layers, but the model has {len(self.layers)} with experts"
        if per_token != self.per_token:
            return f"routes have {per_token} experts per token, but the model's routers select {self.per_token}"
        if rows > tokens:
            return f"routes have {rows} tokens, but the sequence has {tokens}"
        if routes.dtype != self.dtype:
            return f"routes are {routes.dtype}, but those of {self.experts} experts are {self.dtype}"
        if rows and (highest := int(routes.max())) >= self.experts:
            return f"routes contain expert {highest}, but the model has {self.experts}"
        if self.per_token > 1 and rows:
            ordered = np.sort(routes, axis=-1)
            if (repeats := (ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2))).any():
                return f"routes send token {int(repeats.argmax())} to one expert twice"
        return None


def to_json(routes: Routes) -> dict[str, object]:
    """Routes as JSON: dtype, shape, and the little-endian data in C order as base64."""
    import numpy as np

    little_endian = np.ascontiguousarray(routes, routes.dtype.newbyteorder("<"))
    return {"dtype": routes.dtype.name, "shape": list(routes.shape), "data": base64.b64encode(little_endian.data).decode()}


def from_json(data: Mapping[str, Any]) -> Routes:
    """Inverse of `to_json`. Raises ValueError with the name of an invalid field."""
    import numpy as np

    dtype, shape = data["dtype"], data["shape"]
    if dtype not in ("uint8", "uint16"):
        raise ValueError(f"dtype: must be uint8 or uint16, got {dtype}")
    raw = base64.b64decode(data["data"], validate=True)
    stored_dtype = np.dtype(dtype).newbyteorder("<")
    if len(shape) != 3 or min(shape) < 0 or len(raw) != int(np.prod(shape, dtype=object)) * stored_dtype.itemsize:
        raise ValueError(f"data: has {len(raw)} bytes, which does not match {dtype} {list(shape)}")
    return np.frombuffer(raw, stored_dtype).reshape(shape).astype(dtype)
