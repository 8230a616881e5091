"""Patches of Megatron-Bridge 0.6.2, and its import without Transformer Engine."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Callable
from functools import partial, update_wrapper
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtpctl.compat import require_release
from mtpctl.compat.transformers import import_transformers

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge
    from megatron.core.transformer import TransformerConfig

RELEASE = "0.6.2"
_MODELS_PACKAGE = "megatron.bridge.models"
_MAPPING_MODULE = "megatron.bridge.models.conversion.param_mapping"
_FAMILIES = ("mimo", "llama", "mistral", "qwen", "qwen_vl", "glm", "deepseek", "ernie", "mimo_v2_flash", "nemotronh")
"""The subpackages of `megatron.bridge.models` that support the families in `mtpctl.families.registry`."""
_TE_MODULES = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")
_TE_LAYERS = ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNorm", "RMSNorm", "LayerNormMLP")


def import_auto_bridge() -> type[AutoBridge]:
    """Import Megatron-Bridge's `AutoBridge` with the patches below. Raises RuntimeError for another release.

    Only the PEFT code of Megatron-Bridge imports `transformer_engine.pytorch` at module level. If Transformer Engine is not installed, stub
    modules replace it during the import and are removed afterwards. megatron-core is imported first, so that it does not detect the stubs.
    """
    require_release("megatron-bridge", RELEASE, __name__)
    import_transformers()
    if "megatron.bridge" in sys.modules or importlib.util.find_spec("transformer_engine") is not None:
        auto_bridge = _get_auto_bridge()
    else:
        auto_bridge = _import_with_stubs()
    _cache_config_copies()
    _split_heads_by_views()
    _disable_output_norm_offset()
    return auto_bridge


def _get_auto_bridge() -> type[AutoBridge]:
    return importlib.import_module("megatron.bridge").AutoBridge


def _import_with_stubs() -> type[AutoBridge]:
    importlib.import_module("megatron.core.models.gpt.gpt_model")
    _install_lazy_package()
    stubs = _make_te_stubs()
    sys.modules.update(stubs)
    # The bridge logs every missing optional symbol of Transformer Engine, and the stubs have almost none.
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        auto_bridge = _get_auto_bridge()
        for name in _FAMILIES:  # A bridge registers itself when its module is imported.
            importlib.import_module(f"{_MODELS_PACKAGE}.{name}")
        return auto_bridge
    finally:
        logging.disable(disabled)
        # The bridge also sets the root logger to INFO, at which megatron-core logs its whole configuration.
        logging.getLogger("megatron").setLevel(logging.ERROR)
        for name in stubs:
            del sys.modules[name]


def _make_te_stubs() -> dict[str, types.ModuleType]:
    modules = {}
    for name in _TE_MODULES:
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        module.__dict__["__version__"] = "0.0.0"
        modules[name] = module
    pytorch, ops = modules[_TE_MODULES[1]], modules[_TE_MODULES[2]]
    for name in _TE_LAYERS:
        setattr(pytorch, name, type(name, (torch.nn.Linear,), {}))
    ops.__dict__["Sequential"] = torch.nn.Sequential
    modules[_TE_MODULES[0]].__dict__["pytorch"] = pytorch
    pytorch.__dict__["ops"] = ops
    return modules


class _LazyPackage(ModuleType):
    """Replaces `megatron.bridge.models`. Imports the module of a name when the name is first used.

    The original imports all architectures: 190 modules, of which a run needs a few. The module of each name is parsed from its source.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(_MODELS_PACKAGE)
        self.__spec__ = ModuleSpec(_MODELS_PACKAGE, None, is_package=True)
        self.__path__ = self.__spec__.submodule_search_locations = [str(folder)]
        source = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
        imports = (node for node in source.body if isinstance(node, ast.ImportFrom) and node.module)
        self._sources = {alias.asname or alias.name: (str(node.module), alias.name) for node in imports for alias in node.names}

    def __getattr__(self, name: str) -> object:
        if name not in self.__dict__.get("_sources", {}):
            raise AttributeError(f"module {_MODELS_PACKAGE!r} has no attribute {name!r}")
        module, attribute = self._sources[name]
        value = getattr(importlib.import_module(module), attribute)
        setattr(self, name, value)
        return value


def _install_lazy_package() -> None:
    """Replace `megatron.bridge.models` by the lazy package. Megatron-Bridge must not be imported yet."""
    assert "megatron.bridge" not in sys.modules
    megatron = importlib.import_module("megatron")
    spec = PathFinder.find_spec("megatron.bridge", megatron.__path__)
    assert spec is not None and spec.submodule_search_locations is not None
    sys.modules[_MODELS_PACKAGE] = _LazyPackage(Path(next(iter(spec.submodule_search_locations))) / "models")


class _CachedCopy:
    """Wraps the function that copies the transformer config, and caches one copy per config object and depth."""

    def __init__(self, upstream: Callable[[object, int, int], object]) -> None:
        self._upstream = upstream
        self._copies: dict[tuple[int, int], tuple[object, object]] = {}

    def __call__(self, obj: object, max_depth: int = 3, current_depth: int = 0) -> object:
        key = (id(obj), max_depth)
        # The original is stored as well, so that its id is not reused.
        if key not in self._copies or self._copies[key][0] is not obj:
            self._copies[key] = (obj, self._upstream(obj, max_depth, current_depth))
        return self._copies[key][1]


def _cache_config_copies() -> None:
    """Copy each transformer config once.

    Megatron-Bridge copies the whole config, without members that cannot be pickled, for each fused QKV weight, which takes longer than
    splitting the weight. The copies are kept until the process ends, so a config must not change after the first export.
    """
    mapping = vars(importlib.import_module(_MAPPING_MODULE))
    if not isinstance(mapping["remove_non_pickleables"], _CachedCopy):
        mapping["remove_non_pickleables"] = _CachedCopy(mapping["remove_non_pickleables"])


def _split_heads_by_views() -> None:
    """Split fused QKV weights and biases by views.

    Megatron-Bridge selects the heads by index tensors on the CPU. If the weights are on a GPU, each selection copies its indices there and
    waits for all work of the GPU, three times for each weight and bias in every export.
    """
    mapping = vars(importlib.import_module(_MAPPING_MODULE))
    for name in ("split_qkv_weights", "split_qkv_biases"):
        if not hasattr(mapping[name], "__wrapped__"):
            mapping[name] = update_wrapper(partial(_split_heads), mapping[name])


def _split_heads(config: TransformerConfig, qkv: Tensor, feature_dim: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Split `qkv` into queries, keys and values. Each group of `qkv` has its query heads, their gates if any, a key head and a value head.

    The results are in Hugging Face's order: the gate of a head follows its query. feature_dim: unused; upstream's function has it.
    """
    groups, heads_per_query = config.num_query_groups, 2 if getattr(config, "attention_output_gate", False) else 1
    assert groups is not None
    queries = config.num_attention_heads // groups
    q, kv = qkv.unflatten(0, (groups, heads_per_query * queries + 2, -1)).split((heads_per_query * queries, 2), 1)
    k, v = kv.transpose(0, 1).flatten(1, 2)  # one copy for both
    return q.unflatten(1, (heads_per_query, queries)).transpose(1, 2).flatten(0, 3), k, v


def _disable_output_norm_offset() -> None:
    """Convert the output norm of linear attention unchanged. Raises RuntimeError if the bridges no longer use its mapping.

    Qwen3-Next and Qwen3.5 store this norm around 1, and all others around 0. Megatron-Bridge subtracts 1 on loading and adds it on export,
    in the dtype of the weights, so values are rounded: in bf16, 0.05005 becomes 0.05078. `mtpctl.model.delta_net` uses the stored value.
    """
    name = "RMSNorm2ZeroCenteredRMSNormMapping"
    plain = vars(importlib.import_module(_MAPPING_MODULE))["AutoMapping"]
    for bridge in ("megatron.bridge.models.qwen.qwen35_bridge", "megatron.bridge.models.qwen.qwen3_next_bridge"):
        names = vars(importlib.import_module(bridge))
        if name not in names:
            raise RuntimeError(f"{__name__}: {bridge} no longer has {name}: check how it maps the norm")
        names[name] = plain
