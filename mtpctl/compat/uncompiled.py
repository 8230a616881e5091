"""Import megatron-core without its compiler on a machine without a card.

megatron-core compiles some fifty small functions by decorators, so that importing it imports torch's compiler, which takes seconds in
every trainer and log-prob process. On a CPU none of them should be compiled: the first call of each would wait for a C++ compiler.
Packages that import megatron-core call `install` first; it imports nothing itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_DECORATES = "megatron.core"


def _skipping_megatron(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` that returns megatron-core's functions as they are, and compiles everybody else's."""

    @functools.wraps(compile_)
    def compile_or_not(model: Any = None, **options: Any) -> Any:
        if not sys._getframe(1).f_globals["__name__"].startswith("megatron."):
            return compile_(model, **options)
        return (lambda function: function) if model is None else model

    return compile_or_not


class _BeforeMegatron(MetaPathFinder):
    """Told of every import; replaces `torch.compile` when megatron-core's comes, and finds no module itself."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == _DECORATES:
            sys.meta_path.remove(self)
            import torch

            if not torch.cuda.is_available():
                torch.compile = _skipping_megatron(torch.compile)
        return None


def install() -> None:
    """Have megatron-core imported without torch's compiler where there is no card. May be called again, and after it was imported."""
    if _DECORATES not in sys.modules and not any(isinstance(finder, _BeforeMegatron) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeMegatron())
