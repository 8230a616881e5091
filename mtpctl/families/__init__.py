"""What is particular to a model family, as data: sizes, tensor names and shapes, MTP conventions."""

from mtpctl.families.hub import HUB_CONFIGS, hub_config
from mtpctl.families.reading import MTP_COUNTS, family_of, mtp_layers_of, shape_of
from mtpctl.families.registry import FAMILIES, Family
from mtpctl.families.serving import beyond_vllm_on_a_cpu, check_importable, left_to_engines
from mtpctl.families.shape import DeltaShape, LatentShape, ModelShape, MoeShape, MtpConvention
from mtpctl.families.tensors import aliases, count, section_of, tensors
from mtpctl.families.toy import toy_config

__all__ = [
    "FAMILIES",
    "HUB_CONFIGS",
    "MTP_COUNTS",
    "DeltaShape",
    "Family",
    "LatentShape",
    "ModelShape",
    "MoeShape",
    "MtpConvention",
    "aliases",
    "beyond_vllm_on_a_cpu",
    "check_importable",
    "count",
    "family_of",
    "hub_config",
    "left_to_engines",
    "mtp_layers_of",
    "section_of",
    "shape_of",
    "tensors",
    "toy_config",
]
