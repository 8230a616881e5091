"""Routes: the experts that an engine sent each token to, so that the trainer can send it there again.

Routes are one array `[tokens, layers, k]` of expert numbers, a byte each up to 256 experts and two bytes beyond. `tokens` are the first
ones of prompt and response together: a token has its row once the token behind it is sampled, so that the last one never has any, and
tokens without a row are left to the trainer's own router. `layers` are the decoder layers that have experts, in their order. MTP layers
are not among them: their routers choose for themselves everywhere.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtpctl.families.shape import ModelShape

if TYPE_CHECKING:
    # Processes that hold samples without routes, as those of rewards, start without numpy.
    import numpy as np
    import numpy.typing as npt

type Routes = npt.NDArray[np.unsignedinteger[Any]]
"""`[tokens, layers, k]`, uint8 or uint16."""


@dataclass(frozen=True, slots=True)
class RouteShape:
    """What routes of a model look like: `layers` are the decoder layers with experts, `per_token` is k."""

    layers: tuple[int, ...]
    per_token: int
    experts: int

    @classmethod
    def of(cls, shape: ModelShape) -> RouteShape | None:
        """Those of a model; None for one without experts."""
        moe = shape.moe
        if moe is None:
            return None
        layers = tuple(layer for layer in range(shape.layers) if layer not in moe.dense_layers)
        return cls(layers, moe.experts_per_token, moe.experts)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest type that holds every expert's number."""
        import numpy as np

        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    @property
    def token_bytes(self) -> int:
        return len(self.layers) * self.per_token * self.dtype.itemsize

    def fault(self, routes: Routes, tokens: int) -> str | None:
        """Why `routes` cannot be those of a sequence of so many tokens; None where they can."""
        import numpy as np

        if routes.ndim != 3 or routes.dtype.kind != "u":
            return f"routes are {routes.dtype} of {routes.ndim} dimensions, and should be {self.dtype} [tokens, layers, experts a token]"
        rows, layers, per_token = routes.shape
        if layers != len(self.layers):
            return f"routes have {layers} layers, the model has {len(self.layers)} with experts"
        if per_token != self.per_token:
            return f"routes name {per_token} experts a token, the model's routers choose {self.per_token}"
        if rows > tokens:
            return f"routes are of {rows} tokens, the sequence has {tokens}"
        if routes.dtype != self.dtype:
            return f"routes are {routes.dtype}, those of {self.experts} experts are {self.dtype}"
        if rows and (highest := int(routes.max())) >= self.experts:
            return f"routes name expert {highest}, the model has {self.experts}"
        if self.per_token > 1 and rows:
            ordered = np.sort(routes, axis=-1)
            if (twice := (ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2))).any():
                return f"routes send token {int(twice.argmax())} to one expert twice"
        return None


def to_json(routes: Routes) -> dict[str, object]:
    """Routes as JSON takes them: type, sizes, and the numbers in base64, little-endian, in C order."""
    import numpy as np

    plain = np.ascontiguousarray(routes, routes.dtype.newbyteorder("<"))
    return {"dtype": routes.dtype.name, "shape": list(routes.shape), "data": base64.b64encode(plain.data).decode()}


def from_json(data: Mapping[str, Any]) -> Routes:
    """Inverse of `to_json`. Raises ValueError, with the field's name, for what is no such array."""
    import numpy as np

    dtype, shape = data["dtype"], data["shape"]
    if dtype not in ("uint8", "uint16"):
        raise ValueError(f"dtype: must be uint8 or uint16, got {dtype}")
    raw = base64.b64decode(data["data"], validate=True)
    wanted = np.dtype(dtype).newbyteorder("<")
    if len(shape) != 3 or min(shape) < 0 or len(raw) != int(np.prod(shape, dtype=object)) * wanted.itemsize:
        raise ValueError(f"data: has {len(raw)} bytes, which are not those of {dtype} {list(shape)}")
    return np.frombuffer(raw, wanted).reshape(shape).astype(dtype)
