"""Megatron-Bridge's package of models, whose modules are imported when they are used (megatron-bridge 0.6.2).

`megatron.bridge.models` imports the classes of every architecture that it knows: 190 modules, of which a run needs a few.
The package that is installed here has the same names. It reads from the original's source which module defines each name,
and imports that module when the name is first used. A bridge registers itself when its module is imported, so the bridges
of the supported families are imported by name.
"""

from __future__ import annotations

import ast
import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PACKAGE = "megatron.bridge.models"
FAMILIES = ("mimo", "llama", "qwen", "qwen_vl", "glm", "deepseek")
"""The subpackages whose bridges serve `mtpctl.families.registry`."""


class LazyPackage(ModuleType):
    """A package that imports the module of a name when the name is first used."""

    def __init__(self, folder: Path) -> None:
        super().__init__(PACKAGE)
        self.__spec__ = ModuleSpec(PACKAGE, None, is_package=True)
        self.__path__ = self.__spec__.submodule_search_locations = [str(folder)]
        self._sources = sources_of(folder / "__init__.py")

    def __getattr__(self, name: str) -> object:
        if name not in self.__dict__.get("_sources", {}):
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")
        module, attribute = self._sources[name]
        value = getattr(importlib.import_module(module), attribute)
        setattr(self, name, value)
        return value


def sources_of(file: Path) -> dict[str, tuple[str, str]]:
    """The module and the name there of each name that a package's `__init__.py` imports at its top level."""
    imports = (node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name: (node.module, alias.name) for node in imports if node.module for alias in node.names}


def install() -> None:
    """Put the lazy package in place of the original, before anything of Megatron-Bridge is imported. The caller checks the version."""
    assert "megatron.bridge" not in sys.modules
    megatron = importlib.import_module("megatron")
    spec = PathFinder.find_spec("megatron.bridge", megatron.__path__)
    assert spec is not None and spec.submodule_search_locations is not None
    sys.modules[PACKAGE] = LazyPackage(Path(next(iter(spec.submodule_search_locations))) / "models")


def register_families() -> None:
    """Import the bridges of the supported families."""
    for name in FAMILIES:
        importlib.import_module(f"{PACKAGE}.{name}")
