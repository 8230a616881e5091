"""Names that answers to functional cases may use without an import, because LiveCodeBench imports them."""

from __future__ import annotations

import builtins
import importlib

_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools", "functools"),
    *("operator", "io", "sys", "json", "typing"),
)


def prelude(function: str) -> dict[str, object]:
    """The public names of these modules apart from Python's own, and the modules themselves, without the name of the answer's function."""
    modules = {name: importlib.import_module(name) for name in _MODULES}
    space: dict[str, object] = {}
    for module in modules.values():
        names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        space |= {name: getattr(module, name) for name in names if not hasattr(builtins, name)}
    space |= modules
    return {name: each for name, each in space.items() if name not in (function, "Solution")}
