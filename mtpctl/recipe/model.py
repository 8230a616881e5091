"""The sections `model` and `mtp`: the model to train, its folder and config, and the training of its MTP layers."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mtpctl.errors import PrerequisiteMissing, UserError
from mtpctl.families.configs import HUB_CONFIGS, hub_config
from mtpctl.families.drafters import DrafterKind, add_drafter_config
from mtpctl.families.reading import DRAFTER, describe_context, extend_context, shape_of
from mtpctl.families.registry import FAMILIES, check_hub_name
from mtpctl.families.shape import ModelShape
from mtpctl.recipe.section import Complaints, Fraction, HomePath, NonNegativeFloat, PositiveInt, Section

if TYPE_CHECKING:
    from mtpctl.recipe.schema import Recipe

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Names of the precisions in torch and in the engines."""
BYTE_VOCAB_SIZE = 259
"""Vocabulary size of the tokenizer `bytes`: 256 bytes, padding, begin and end."""
LONG_CONTEXT = "model_with_context"
"""Folder in the run directory with links to the model's weights, and a config with more positions."""


class DrafterConfig(Section):
    """A drafter that the run adds to a model without one, and trains in the stage draft."""

    kind: DrafterKind | None = Field(
        None,
        description="mtp: MTP layers of the model's architecture; eagle3: an EAGLE-3 drafter; dflash: a DFlash drafter, which drafts a "
        "block of mtp.repeat tokens in one pass. Default: mtp if vLLM supports MTP layers with the model's trunk, else eagle3.",
    )
    layers: PositiveInt = Field(1, description="MTP layers to add, or layers of the DFlash drafter.")


class ModelConfig(Section):
    path: HomePath | None = Field(None, description="Hugging Face folder, or hub id such as zai-org/GLM-4.7; see mtpctl doctor --model.")
    init: Literal["weights", "random"] = Field("weights", description="weights: load them; random: initialize them from the seed.")
    config: dict[str, object] | None = Field(None, description="Fields of a Hugging Face config.json, of which the run creates a model.")
    context: PositiveInt | None = Field(None, description="Maximum tokens of a prompt with its response, if more than in the config.")
    rope_scaling: dict[str, object] | None = Field(
        None,
        description="RoPE scaling for model.context in transformers' format, for example {rope_type: yarn, factor: 4.0}; default: "
        "that of the config, so later positions are extrapolated.",
    )
    drafter: DrafterConfig | None = Field(None, description="A drafter to add to a model without one; train it in the stage draft.")
    tokenizer: HomePath | None = Field(None, description="Tokenizer folder, hub id, or `bytes`; default: the model's own tokenizer.")

    @property
    def randomly_initialized(self) -> bool:
        """Whether the run initializes its weights from the seed and writes them into its directory."""
        return self.config is not None or self.init == "random"

    def folder_in(self, run: Path) -> Path | None:
        """The model's folder in the run directory `run` if the run creates one (random weights, drafter, longer context)."""
        if self.randomly_initialized:
            return run / "model"
        if self.drafter is not None:
            return run / "model_with_drafter"
        return None if self.context is None else run / LONG_CONTEXT


MtpLoss = Literal["ce", "soft_ce", "kl", "tv", "e2e_tv"]
"""Losses of an MTP depth. Kernels and trainer derive their types from this list (`mtpctl.kernels.backend.DraftLoss`)."""


class MtpConfig(Section):
    mode: Literal["off", "load", "joint", "isolated"] = Field(
        "isolated",
        description="off: no MTP layers; load: loaded and exported, but frozen; joint: trained, and their loss also updates the trunk; "
        "isolated: trained, and their loss updates neither trunk, embedding nor LM head.",
    )
    loss: MtpLoss = Field(
        "ce",
        description="Target of each MTP depth. ce: the sampled token; the others: the trunk's distribution, by cross-entropy (soft_ce), KL "
        "divergence (kl) or total variation (tv), the share of probabilistic drafts that would be rejected. e2e_tv: maximizes the expected "
        "number of accepted drafts per step over all depths, for the kind of drafts in rollout.speculation.draft_method.",
    )
    loss_mix: Fraction = Field(1.0, description="Weight of mtp.loss; ce has the weight 1 - loss_mix.")
    loss_scale: NonNegativeFloat = Field(0.1, description="Weight of the MTP loss relative to the main loss.")
    clip_grad: NonNegativeFloat = Field(1.0, description="Maximum gradient norm of the MTP layers; 0: no clipping.")
    repeat: PositiveInt = Field(1, description="MTP depths that share one MTP layer; with a DFlash drafter, the drafts of a block.")

    @property
    def trains(self) -> bool:
        return self.mode in ("joint", "isolated")


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a safetensors header in bytes, as in the safetensors library."""


def check_model(model: ModelConfig) -> Complaints:
    """Report folders without weights, and missing tokenizers. Raises UserError as `model_folder` does."""
    folder = model_folder(model)
    if folder is not None and model.init == "weights" and not has_weights(folder):
        yield f"model.path: {folder} has no weights (*.safetensors); name a folder with weights, or set model.init: random"
    if model.config is not None and model.tokenizer is None:
        yield "model.tokenizer: a model from model.config has no tokenizer; set `bytes`, or a tokenizer folder"
    if model.rope_scaling is not None and model.context is None:
        yield "model.rope_scaling: has no effect without model.context; set model.context, or leave rope_scaling out"
    name = model.tokenizer
    if name and name != "bytes" and not Path(name).is_dir() and not TOKENIZER_ID.fullmatch(name):
        yield f"model.tokenizer: there is no folder {name}; name a folder with a tokenizer, a hub id, or `bytes`"


def check_byte_tokenizer(model: ModelConfig, shape: ModelShape | None) -> Complaints:
    """Report a vocabulary that is too small for the byte tokenizer."""
    if model.tokenizer == "bytes" and shape is not None and shape.vocab < BYTE_VOCAB_SIZE:
        yield f"model.config.vocab_size: {shape.vocab} is too small for the {BYTE_VOCAB_SIZE} ids of the byte tokenizer"


def check_mtp(recipe: Recipe, shape: ModelShape | None) -> Complaints:
    """Report MTP training and speculation that the model's MTP layers do not support."""
    k = recipe.rollout.speculation.model_tokens
    lacks_head = shape is not None and not has_mtp_head(recipe.model, shape)
    if lacks_head and recipe.mtp.mode != "off":
        yield f"mtp.mode: {recipe.mtp.mode} needs an MTP head, but the model has none; leave mtp.mode out, or set it to off"
    if recipe.mtp.loss == "e2e_tv" and recipe.mtp.mode == "joint":
        yield "mtp.loss: e2e_tv trains the MTP layers only, but mtp.mode: joint also trains the trunk; set isolated, or mtp.loss: tv"
    if not recipe.mtp.trains and not lacks_head and "draft" in recipe.train.stages:
        yield f"mtp.mode: {recipe.mtp.mode} does not train the drafter, but the stage draft does; set it to isolated"
    if lacks_head and "draft" in recipe.train.stages:
        yield "train.stages: draft trains a drafter, but the model has none; add one with model.drafter, or with mtpctl add-drafter"
    if shape is not None and shape.boundaries:
        yield from _check_separate_drafter(recipe, shape)
    if lacks_head and k:
        yield f"rollout.speculation.num_tokens: {k} needs an MTP head, but the model has none; leave it out, or set it to 0"
    elif recipe.mtp.mode == "off" and k:
        yield f"rollout.speculation.num_tokens: {k} needs the MTP layers that mtp.mode: off leaves out; set it to 0, or mtp.mode: load"
    layers = 0 if shape is None else shape.mtp_layers
    if layers <= 1:
        return
    if recipe.mtp.repeat > 1:
        yield f"mtp.repeat: {recipe.mtp.repeat} depths share one MTP layer, but the model has {layers}; set it to 1"
    if not recipe.rollout.traits.mtp_by_depth:
        return
    if k > 1 and recipe.device == "cpu":
        yield (
            f"rollout.speculation.num_tokens: {k}, but vLLM on a CPU drafts every token with the first of the model's {layers} MTP layers; "
            "set it to 1"
        )
    elif k > layers:
        yield (
            f"rollout.speculation.num_tokens: {k}, but after the model's {layers} MTP layers vLLM starts over with the first, which is "
            f"not trained for that depth; set it to {layers} or less"
        )


def _check_separate_drafter(recipe: Recipe, shape: ModelShape) -> Complaints:
    """Report settings that an EAGLE-3 or DFlash drafter does not support."""
    drafter, speculation = "an EAGLE-3 drafter" if shape.dflash is None else "a DFlash drafter", recipe.rollout.speculation
    if recipe.mtp.mode == "joint":
        yield f"mtp.mode: joint is not supported with {drafter}, whose loss does not reach the trunk; set it to isolated"
    if not recipe.rollout.traits.other_drafters:
        yield f"rollout.engine: {recipe.rollout.engine} cannot receive {drafter}; set vllm"
    if recipe.train.parallel.pp > 1:
        yield f"train.parallel.pp: {drafter} reads states of several stages, which is not supported; set it to 1"
    if shape.dflash is None or recipe.mtp.mode == "off":
        return
    # All inputs of a block attend to one another, so a different number of mask tokens changes every draft.
    if speculation.model_tokens not in (0, recipe.mtp.repeat):
        yield (
            f"rollout.speculation.num_tokens: {speculation.model_tokens}, but the DFlash drafter is trained for blocks of mtp.repeat "
            f"({recipe.mtp.repeat}) drafts; set both to the same number"
        )
    if speculation.verification == "block" and speculation.model_tokens:
        yield "rollout.speculation.verification: block is not supported with a DFlash drafter; set token"
    if speculation.auto and speculation.model_tokens:
        yield "rollout.speculation.auto: not supported with a DFlash drafter, which is trained for a fixed number of drafts; set false"


def model_folder(model: ModelConfig, field: str = "model.path") -> Path | None:
    """The folder of `model.path`; None for a hub id or an inline config. `field` names the path in errors.

    Raises UserError if the path is neither a folder nor has the form of a hub id.
    """
    if model.path is None:
        return None
    folder = Path(model.path)
    if folder.is_dir():
        return folder
    if folder.is_file() and folder.suffix == ".gguf":
        raise UserError(
            f"{field}: {folder} is a GGUF file, but a Hugging Face folder is required; create one with transformers: "
            f'AutoModelForCausalLM.from_pretrained("{folder.parent}", gguf_file="{folder.name}").save_pretrained(FOLDER), and the '
            "tokenizer too"
        )
    if folder.is_file():
        raise UserError(f"{field}: {folder} is a file; name its folder, which must have a config.json")
    if folder.suffix == ".gguf":
        raise UserError(f"{field}: there is no file {folder}, and GGUF files are not supported; name a Hugging Face folder or a hub id")
    if HUB_ID.fullmatch(model.path) and not folder.parent.is_dir():
        return None
    raise UserError(f"{field}: there is no folder {model.path}; name a Hugging Face folder, or a hub id such as XiaomiMiMo/MiMo-7B-RL")


def has_mtp_head(model: ModelConfig, shape: ModelShape) -> bool:
    """Whether the model has MTP layers, according to its config or to the weights in its folder."""
    if shape.mtp_layers or model.randomly_initialized or model.path is None or not (folder := Path(model.path)).is_dir():
        return bool(shape.mtp_layers)
    family = next(family for family in FAMILIES if family.name == shape.family)
    if family.mtp is None:
        return False
    layer = family.mtp.name(family.mtp.layer, 0, shape.layers)
    return any(name.startswith(layer) for name in tensor_names(folder))


def has_drafter(model: ModelConfig) -> bool:
    """Whether the folder that `model` names has a model with a drafter."""
    if model.path is None or not (Path(model.path) / "config.json").is_file():
        return False
    return has_mtp_head(model, shape_of(read_config(Path(model.path))))


def engine_method(folder: Path) -> Literal["mtp", "eagle3", "dflash"]:
    """vLLM's method for the drafter of the model in `folder`."""
    if not (folder / DRAFTER / "config.json").is_file():
        return "mtp"
    return "eagle3" if shape_of(read_config(folder)).dflash is None else "dflash"


def absolute_path(path: str | None) -> str | None:
    """The absolute path of a folder, for comparison; a hub id is returned unchanged."""
    return str(Path(path).resolve()) if path is not None and Path(path).exists() else path


def hf_config(model: ModelConfig, *, fetch: bool = True, field: str = "model.path") -> dict[str, object] | None:
    """The config.json fields of the recipe's model, with the context and the drafter that the recipe adds.

    `fetch`: if false, the hub is not contacted, and the result is None for a hub model that is not in `families.configs`. `field`: name of
    the path in errors. Raises UserError for a folder without a usable config.json, PrerequisiteMissing if the hub does not respond.
    """
    config = _base_config(model, fetch=fetch, field=field)
    if config is not None and model.context is not None:
        config = extend_context(config, model.context, model.rope_scaling)
    if model.drafter is None or config is None:
        return config
    return add_drafter_config(config, model.drafter.kind, model.drafter.layers)


def context_note(model: ModelConfig) -> str | None:
    """Describe in one line how the model reaches `model.context`. None if it is not set, or if the config is not on this machine."""
    if model.context is None or (config := _base_config(model, fetch=False, field="model.path")) is None:
        return None
    return describe_context(shape_of(config), shape_of(extend_context(config, model.context, model.rope_scaling)))


def _base_config(model: ModelConfig, *, fetch: bool, field: str) -> dict[str, object] | None:
    if (model.config is None) == (model.path is None):
        reason = "both are set" if model.path else "neither is set"
        raise UserError(f"model: {reason}; set model.path to a folder or hub id, or model.config to the fields of a new model")
    if model.config is not None:
        return dict(model.config)
    folder = model_folder(model, field)
    if folder is not None:
        return read_config(folder, field)
    assert model.path is not None
    if model.path in HUB_CONFIGS:
        return hub_config(model.path)
    check_hub_name(model.path)
    return _fetch(model.path, field) if fetch else None


def cached_file(path: str, name: str) -> Path | None:
    """A file of a model or tokenizer, in the folder `path` or in the hub's cache; None if it is not on this machine."""
    if Path(path).is_dir():
        return file if (file := Path(path) / name).is_file() else None
    if not TOKENIZER_ID.fullmatch(path):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached_path = try_to_load_from_cache(path, name)
    return Path(cached_path) if isinstance(cached_path, str) else None


def has_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)


def tensor_names(folder: Path) -> set[str]:
    """Names of the tensors in a folder's safetensors files. Unreadable files are skipped; loading the weights reports them."""
    names: set[str] = set()
    for index in folder.glob("*.safetensors.index.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            names.update(json.loads(index.read_bytes())["weight_map"])
    if not names:
        for file in folder.glob("*.safetensors"):
            with contextlib.suppress(OSError, ValueError), file.open("rb") as stream:
                names.update(json.loads(stream.read(min(int.from_bytes(stream.read(8), "little"), _MAX_HEADER_BYTES))))
    return names


def read_config(folder: Path, field: str = "model.path", name: str = "config.json") -> dict[str, object]:
    """The fields of a folder's config.json, with those of its drafter under `drafter`. Raises UserError. `field`: for errors."""
    config = _read(folder / name, field)
    if (folder / DRAFTER / "config.json").is_file():
        config[DRAFTER] = _read(folder / DRAFTER / "config.json", field)
    return config


def _read(path: Path, field: str) -> dict[str, object]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{field}: {path.parent} has no config.json; name a Hugging Face model folder") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{field}: {path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{field}: {path}:{error.lineno}: not valid JSON: {error.msg}") from error
    if not isinstance(config, dict):
        raise UserError(f"{field}: {path}:1: must be a JSON object")
    return config


def _fetch(hub_id: str, field: str) -> dict[str, object]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return _read(Path(hf_hub_download(hub_id, "config.json")), field)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PrerequisiteMissing(f"{field}: the config of {hub_id} could not be downloaded from the hub ({reason})") from error
