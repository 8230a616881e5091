"""Imports transformers faster, and registers the model type `mimo` with it.

transformers asks at import which distribution provides each package. Python then tests whether each file of each distribution exists:
28,000 with mtpctl's dependencies. This takes 0.5 s per process on a local disk, and longer on a network file system. Here the answer is
read from the lists of files in the distributions' metadata.
"""

from __future__ import annotations

import csv
import importlib
import importlib.metadata
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable

from mtpctl.compat import replace_temporarily


def import_transformers() -> None:
    """Import transformers if it is not imported yet. Raises RuntimeError if Python no longer has `packages_distributions`."""
    if "transformers" in sys.modules:
        return
    error_message = f"importlib.metadata has no packages_distributions: see {__name__}"
    with replace_temporarily("importlib.metadata", "packages_distributions", packages_distributions, error_message):
        importlib.import_module("transformers.utils.import_utils")


def packages_distributions() -> dict[str, list[str]]:
    """The distributions of each top-level package, like `importlib.metadata.packages_distributions`.

    Packages are included even if the listed files do not exist.
    """
    result: defaultdict[str, list[str]] = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        name, top_level_packages = distribution.metadata["Name"], (distribution.read_text("top_level.txt") or "").split()
        for package in top_level_packages or _top_level_packages(_listed_files(distribution)):
            result[package].append(name)
    return dict(result)


def _listed_files(distribution: importlib.metadata.Distribution) -> Iterable[str]:
    record = distribution.read_text("RECORD")
    return map(str, distribution.files or ()) if record is None else (row[0] for row in csv.reader(record.splitlines()) if row)


def _top_level_packages(files: Iterable[str]) -> set[str]:
    names = set()
    for file in files:
        root, separator, _ = file.partition("/")
        names.add(root if separator else inspect.getmodulename(file) or file)
    return {name for name in names if "." not in name}


def register_mimo() -> None:
    """Register `model_type: "mimo"`, so that vLLM and Megatron-Bridge can read published MiMo folders. Idempotent.

    transformers has no such model type, and the published folder contains its configuration class as custom code, which is not run. MiMo
    is Qwen2 with additional MTP layers, so a Qwen2 configuration under that name is sufficient. vLLM selects the model by `architectures`,
    and speculates with the MTP layers if the method is `mtp`.
    """
    import_transformers()
    from transformers import AutoConfig, Qwen2Config
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if "mimo" in CONFIG_MAPPING:
        return

    class MiMoConfig(Qwen2Config):
        model_type = "mimo"

    AutoConfig.register("mimo", MiMoConfig)
