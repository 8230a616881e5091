"""The sections `model` and `mtp`: the model to train, and how its MTP layers are trained."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from mtpctl.errors import EnvironmentMissing, UserError
from mtpctl.families.configs import HUB_CONFIGS, hub_config
from mtpctl.families.registry import FAMILIES
from mtpctl.families.shape import ModelShape
from mtpctl.recipe.section import Complaints, Fraction, HomePath, NonNegativeFloat, PositiveInt, Section

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""The names of the precisions in torch and in the engines."""
BYTE_VOCAB_SIZE = 259
"""Ids of the tokenizer `bytes`: 256 bytes, padding, begin and end."""


class ModelConfig(Section):
    path: HomePath | None = Field(None, description="Hugging Face folder, or hub id such as XiaomiMiMo/MiMo-7B-RL.")
    init: Literal["weights", "random"] = Field("weights", description="weights: load them; random: draw them from the seed.")
    config: dict[str, object] | None = Field(
        None, description="Hugging Face config.json fields, inline: a new model of this shape is made in the run directory."
    )
    tokenizer: HomePath | None = Field(None, description="Tokenizer folder, or `bytes`; default: the one beside the model.")

    @property
    def drawn(self) -> bool:
        """Whether a run draws its first weights from its seed; they are then written into its directory."""
        return self.config is not None or self.init == "random"


class MtpConfig(Section):
    mode: Literal["off", "load", "joint", "isolated"] = Field(
        "isolated",
        description="off: no MTP layers; load: loaded and exported, not trained; joint: trained, and their loss also updates the trunk; "
        "isolated: trained, and their loss updates neither trunk, embedding nor LM head.",
    )
    loss: Literal["ce", "soft_ce", "kl", "tv"] = Field(
        "ce",
        description="What each MTP depth learns: ce: the sampled token; the trunk's own distribution of that token by cross-entropy "
        "(soft_ce), by KL divergence (kl) or by total variation (tv), the share of probabilistic drafts that would be turned down.",
    )
    loss_mix: Fraction = Field(1.0, description="Weight of mtp.loss; the rest of 1 is the weight of ce beside it.")
    loss_scale: NonNegativeFloat = Field(0.1, description="Weight of the MTP loss in the sum with the main loss.")
    clip_grad: NonNegativeFloat = Field(1.0, description="Largest gradient norm of the MTP layers, beyond which it is clipped; 0: never.")
    repeat: PositiveInt = Field(1, description="MTP depths that are trained by applying the one MTP layer repeatedly.")

    @property
    def trains(self) -> bool:
        """Whether the MTP layers are trained."""
        return self.mode in ("joint", "isolated")


# Find a recipe's model: its folder, and its config.json fields.

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_MOST_HEADER = 100_000_000
"""Bytes of a file's header that are read at most; the safetensors library has the same bound."""


def model_fits(model: ModelConfig) -> Complaints:
    """Refuse folders without weights, and tokenizers that are missing. Raises what `model_folder` raises."""
    folder = model_folder(model)
    if folder is not None and model.init == "weights" and not has_weights(folder):
        yield f"model.path: {folder} holds no weights (*.safetensors); give a folder that does, or set model.init: random"
    if model.config is not None and model.tokenizer is None:
        yield "model.tokenizer: a model made from model.config has none beside it; write `bytes`, or a tokenizer folder"
    named = model.tokenizer
    if named and named != "bytes" and not Path(named).is_dir() and not TOKENIZER_ID.fullmatch(named):
        yield f"model.tokenizer: there is no folder {named}; give a folder with a tokenizer, a hub id, or `bytes`"


def model_folder(model: ModelConfig, field: str = "model.path") -> Path | None:
    """The folder that `model.path` names, which errors call `field`; None for a hub id or an inline config.

    Raises UserError where the path is neither a folder nor shaped like a hub id.
    """
    if model.path is None:
        return None
    folder = Path(model.path)
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise UserError(f"{field}: {_file_hint(folder)}")
    if folder.suffix == ".gguf":
        raise UserError(f"{field}: there is no file {folder}, and GGUF files are not supported; name a Hugging Face folder or a hub id")
    if HUB_ID.fullmatch(model.path) and not folder.parent.is_dir():
        return None
    raise UserError(f"{field}: there is no folder {model.path}; give a Hugging Face folder, or a hub id such as XiaomiMiMo/MiMo-7B-RL")


def _file_hint(file: Path) -> str:
    """The problem with a file in place of a folder, and the fix."""
    if file.suffix != ".gguf":
        return f"{file} is a file; name its folder, which must have a config.json"
    return (
        f"{file} is a GGUF file, but a Hugging Face folder is required; create one with transformers: "
        f'AutoModelForCausalLM.from_pretrained("{file.parent}", gguf_file="{file.name}").save_pretrained(FOLDER), and the tokenizer too'
    )


def has_mtp_head(model: ModelConfig, shape: ModelShape) -> bool:
    """Whether the model has MTP layers, named by its config or, in a folder, by its weights alone."""
    if shape.mtp_layers or model.drawn or model.path is None or not (folder := Path(model.path)).is_dir():
        return bool(shape.mtp_layers)
    family = next(family for family in FAMILIES if family.name == shape.family)
    if family.mtp is None:
        return False
    layer = family.mtp.name(family.mtp.layer, 0, shape.layers)
    return any(name.startswith(layer) for name in tensor_names(folder))


def path_in_full(path: str | None) -> str | None:
    """The absolute path of a folder, so that two spellings of one compare equal; a hub id is returned as it is."""
    return str(Path(path).resolve()) if path is not None and Path(path).exists() else path


def hf_config(model: ModelConfig, *, fetch: bool = True, field: str = "model.path") -> dict[str, object] | None:
    """The config.json fields of the recipe's model: inline, from its folder, from `families.hub`, or from the hub.

    With `fetch=False` the hub is not asked, and the result is None for a hub model that `families.hub` does not know. `field`: what errors
    call the path.
    Raises UserError for a recipe without a model and a folder without a usable config.json, EnvironmentMissing for a hub that does not
    answer.
    """
    if (model.config is None) == (model.path is None):
        said = "both are given" if model.path else "neither is given"
        raise UserError(f"model: {said}; set model.path to a folder or hub id, or model.config to the fields of a new model")
    if model.config is not None:
        return dict(model.config)
    folder = model_folder(model, field)
    if folder is not None:
        return _read(folder / "config.json", field)
    assert model.path is not None
    if model.path in HUB_CONFIGS:
        return hub_config(model.path)
    return _fetch(model.path, field) if fetch else None


def cached_file(path: str, name: str) -> Path | None:
    """A file of a model or tokenizer: in the folder `path`, or for a hub id in the hub's cache. None if it is not on this machine."""
    if Path(path).is_dir():
        return file if (file := Path(path) / name).is_file() else None
    if not TOKENIZER_ID.fullmatch(path):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, name)
    return Path(cached) if isinstance(cached, str) else None


def has_weights(folder: Path) -> bool:
    """Whether a model folder holds weight files."""
    return any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)


def tensor_names(folder: Path) -> set[str]:
    """Names of the tensors in a folder's safetensors files. Unreadable files are left out here; loading the weights reports them."""
    names: set[str] = set()
    for index in folder.glob("*.safetensors.index.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            names.update(json.loads(index.read_bytes())["weight_map"])
    if not names:
        for file in folder.glob("*.safetensors"):
            with contextlib.suppress(OSError, ValueError), file.open("rb") as opened:
                names.update(json.loads(opened.read(min(int.from_bytes(opened.read(8), "little"), _MOST_HEADER))))
    return names


def _read(path: Path, field: str) -> dict[str, object]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{field}: {path.parent} holds no config.json; give a Hugging Face model folder") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{field}: {path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{field}: {path}:{error.lineno}: not valid JSON: {error.msg}") from error
    if not isinstance(config, dict):
        raise UserError(f"{field}: {path}:1: must hold an object")
    return config


def _fetch(hub_id: str, field: str) -> dict[str, object]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return _read(Path(hf_hub_download(hub_id, "config.json")), field)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EnvironmentMissing(f"{field}: the config of {hub_id} could not be had from the hub ({reason})") from error
