"""MTP logits of families other than MiMo, of two depths, against vLLM's drafter formula built from transformers' own layers."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpctl.convert.hf_folder import HfFolder
from mtpctl.recipe.model import MtpConfig
from tests.fakes.convert_models import CASES, assert_like, hf_model, use_config_epsilon
from tests.fakes.mimo_reference import norm
from tests.fakes.packed_logits import packed_logits
from tests.fakes.tiny import engine, sequences


class Drafter:
    """One MTP layer with random weights, built from a transformers decoder layer."""

    def __init__(self, model: Any, layer: Any) -> None:
        self.model, self.layer, self.config = model, layer.eval(), model.config.get_text_config()
        size = self.config.hidden_size
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_(0.0, self.config.initializer_range)
                if parameter.dim() == 1:
                    parameter.add_(1.0)
        self.embedding_norm, self.hidden_norm, final_norm = (1.0 + 0.2 * torch.randn(size) for _ in range(3))
        self.final_norm: Tensor | None = final_norm
        self.projection = 0.2 * torch.randn(size, 2 * size)

    def double(self) -> None:
        self.layer.double()
        pieces = (self.embedding_norm, self.hidden_norm, self.projection)
        self.embedding_norm, self.hidden_norm, self.projection = (piece.double() for piece in pieces)
        self.final_norm = None if self.final_norm is None else self.final_norm.double()

    def logits(self, ids: list[int], *, blank_first: bool, zero_centered: bool = False, passes_prenorm: bool = False) -> Tensor:
        """[T - 1 + T - 2, vocab], the first depth's and the second's, through the one layer.

        Entry i of depth k predicts token i + k + 1, from the embedding of token i + k and the state of depth k - 1 at token i; of the
        trunk that is the normed one, of a depth the normed one or, with `passes_prenorm`, the one before. Behind the first depth's
        entries up to i the second's entry i comes as one more position, as in a drafter that goes on from its own draft.
        """
        tokens = torch.tensor([ids])
        add = 1.0 if zero_centered else 0.0
        trunk = self.model.model(tokens).last_hidden_state[0]
        first = self._input(trunk[:-1], tokens[0, 1:], add, blank_first=blank_first)
        out = self._through(first)
        normed = self._final(out, add)
        second = self._input((out if passes_prenorm else normed)[:-1], tokens[0, 2:], add, blank_first=False)
        behind = [self._through(torch.cat([first[: i + 1], second[i : i + 1]]))[-1] for i in range(len(second))]
        return self.model.lm_head(torch.cat([normed, self._final(torch.stack(behind), add)]))

    def _final(self, state: Tensor, add: float) -> Tensor:
        return state if self.final_norm is None else norm(state, self.final_norm + add, self.config.rms_norm_eps)

    def _input(self, state: Tensor, tokens: Tensor, add: float, *, blank_first: bool) -> Tensor:
        """The input of the layer [T, H]."""
        eps = self.config.rms_norm_eps
        embedded = self.model.model.embed_tokens(tokens)
        if blank_first:
            embedded = embedded * (torch.arange(len(embedded)) > 0)[:, None]
        pieces = [norm(embedded, self.embedding_norm + add, eps), norm(state, self.hidden_norm + add, eps)]
        return torch.cat(pieces, dim=-1) @ self.projection.T

    def _through(self, x: Tensor) -> Tensor:
        """The states [T, H] before the final norm."""
        positions = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
        embeddings = self.model.model.rotary_emb(x[None], positions)
        out = self.layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=embeddings)
        return (out[0] if isinstance(out, tuple) else out)[0]


def layer_tensors(layer: Any) -> dict[str, Tensor]:
    """A decoder layer's tensors under the names of checkpoints, with separate experts."""
    result = {}
    for name, value in layer.state_dict().items():
        if name == "mlp.experts.gate_up_proj":
            for number, both in enumerate(value):
                gate, up = both.chunk(2)
                result |= {f"mlp.experts.{number}.gate_proj.weight": gate, f"mlp.experts.{number}.up_proj.weight": up}
        elif name == "mlp.experts.down_proj":
            result |= {f"mlp.experts.{number}.down_proj.weight": down for number, down in enumerate(value)}
        else:
            result[name] = value
    return result


def add_to_folder(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: value.detach().clone() for name, value in tensors.items()}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


DEEPSEEKS = {
    "deepseek-v3": ("deepseek_v3", "DeepseekV3"),
    "deepseek-v3-yarn": ("deepseek_v3", "DeepseekV3"),
    "glm4-moe": ("glm4_moe", "Glm4Moe"),
    "glm4-moe-qk-norm": ("glm4_moe", "Glm4Moe"),
    "glm4-moe-lite": ("glm4_moe_lite", "Glm4MoeLite"),
}


@pytest.mark.parametrize("case", DEEPSEEKS)
def test_drafts_of_deepseek_and_glm_match_transformers(tmp_path: Path, case: str) -> None:
    """MTP layers are numbered after the decoder's, with copies of embedding and head."""
    module, name = DEEPSEEKS[case]
    model = hf_model(*CASES[case], tmp_path)
    layers = model.config.num_hidden_layers
    layer = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), f"{name}DecoderLayer")
    drafter = Drafter(model, layer(model.config, layers - 1))
    use_config_epsilon(drafter.layer, model.config)
    at = f"model.layers.{layers}."
    pieces = {
        "enorm.weight": drafter.embedding_norm,
        "hnorm.weight": drafter.hidden_norm,
        "eh_proj.weight": drafter.projection,
        "shared_head.norm.weight": drafter.final_norm,
        "shared_head.head.weight": model.lm_head.weight,
        "embed_tokens.weight": model.model.embed_tokens.weight,
    }
    tensors = {at + name: value for name, value in (pieces | layer_tensors(drafter.layer)).items()}
    add_to_folder(tmp_path, tensors, num_nextn_predict_layers=1)
    check(tmp_path, drafter, blank_first=True, passes_prenorm=case.startswith("glm"))


@pytest.mark.parametrize("case", ["ernie4.5-moe"])
def test_drafts_of_ernie_match_transformers(tmp_path: Path, case: str) -> None:
    """A dense Llama layer, which rotates halves of a head where the trunk rotates pairs, and no final norm."""
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model = hf_model(*CASES[case], tmp_path)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    config = LlamaConfig(**{name: getattr(model.config, name) for name in names}, attn_implementation="eager")  # type: ignore[call-arg]
    drafter = Drafter(model, LlamaDecoderLayer(config, 0))
    drafter.final_norm = None
    pieces = {
        "model.mtp_emb_norm.0.weight": drafter.embedding_norm,
        "model.mtp_hidden_norm.0.weight": drafter.hidden_norm,
        "model.mtp_linear_proj.0.weight": drafter.projection,
    }
    inside = {f"model.mtp_block.0.{name}": value for name, value in layer_tensors(drafter.layer).items()}
    add_to_folder(tmp_path, pieces | inside, num_nextn_predict_layers=1)
    check(tmp_path, drafter, blank_first=True, passes_prenorm=True)


class WindowDrafter(Drafter):
    """A layer with a sliding window and its own rotary embedding."""

    def _through(self, x: Tensor) -> Tensor:
        positions = torch.arange(len(x))
        back = positions[:, None] - positions
        mask = torch.zeros(back.shape).masked_fill((back < 0) | (back >= self.config.sliding_window), float("-inf"))[None, None]
        embeddings = self.model.model.rotary_emb(x[None], positions[None], "sliding_attention")
        out: Tensor = self.layer(x[None], attention_mask=mask, position_ids=positions[None], position_embeddings=embeddings)[0]
        return out


@pytest.mark.parametrize("case", ["mimo-v2-flash", "mimo-v2-flash-groups"])
def test_drafts_of_mimo_v2_flash_match_transformers(tmp_path: Path, case: str) -> None:
    """A dense layer with a window, sinks, and the key-value heads of the trunk's window layers."""
    from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashDecoderLayer

    model = hf_model(*CASES[case], tmp_path)
    config = model.config
    window_layers = zip(config.layer_types, config.mlp_layer_types, strict=True)
    drafter = WindowDrafter(model, MiMoV2FlashDecoderLayer(config, list(window_layers).index(("sliding_attention", "dense"))))
    renamed = {"self_attn.sinks": "self_attn.attention_sink_bias", "post_attention_layernorm.weight": "pre_mlp_layernorm.weight"}
    pieces = {
        "enorm.weight": drafter.embedding_norm,
        "hnorm.weight": drafter.hidden_norm,
        "eh_proj.weight": drafter.projection,
        "final_layernorm.weight": drafter.final_norm,
    }
    inside = {renamed.get(name, name): value for name, value in layer_tensors(drafter.layer).items()}
    add_to_folder(tmp_path, {f"model.mtp.layers.0.{name}": value for name, value in (pieces | inside).items()}, num_nextn_predict_layers=1)
    check(tmp_path, drafter, blank_first=False)


class BlockDrafter(Drafter):
    """An attention layer and an MoE layer of Nemotron-H, without rotary embedding."""

    def _through(self, x: Tensor) -> Tensor:
        mask = torch.full((len(x), len(x)), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        state = x[None]
        for block in self.layer:
            state = block(state, attention_mask=mask)
        return state[0]


def test_drafts_of_nemotron_h_match_transformers(tmp_path: Path) -> None:
    """Two layers of the trunk's kinds with one projection before, and one final norm after them."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock

    model = hf_model(*CASES["nemotron-h"], tmp_path)
    config = model.config
    config.rms_norm_eps, model.model.embed_tokens = config.layer_norm_epsilon, model.model.embeddings  # the names of other families
    blocks = [NemotronHBlock(config, config.layers_block_type.index(kind)) for kind in ("full_attention", "moe")]
    drafter = BlockDrafter(model, torch.nn.ModuleList(blocks))
    pieces = {
        "mtp.layers.0.enorm.weight": drafter.embedding_norm,
        "mtp.layers.0.hnorm.weight": drafter.hidden_norm,
        "mtp.layers.0.eh_proj.weight": drafter.projection,
        "mtp.layers.1.final_layernorm.weight": drafter.final_norm,
    }
    for name, value in drafter.layer.state_dict().items():
        if ".mixer.experts." in name:
            before, _, projection = name.rpartition(".")
            pieces |= {f"mtp.layers.{before}.{expert}.{projection}.weight": rows for expert, rows in enumerate(value)}
        else:
            pieces[f"mtp.layers.{name}"] = value
    add_to_folder(tmp_path, pieces, num_nextn_predict_layers=1)
    check(tmp_path, drafter, blank_first=False)


QWENS = {"qwen3-next": ("qwen3_next", "Qwen3Next"), "qwen3.5": ("qwen3_5", "Qwen3_5"), "qwen3.5-moe": ("qwen3_5_moe", "Qwen3_5Moe")}


@pytest.mark.parametrize("case", QWENS)
def test_drafts_of_qwen_match_transformers(tmp_path: Path, case: str) -> None:
    """Zero-centered norms, no masked embedding, full attention in the MTP layer."""
    module, name = QWENS[case]
    model = hf_model(*CASES[case], tmp_path)
    layer = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), f"{name}DecoderLayer")
    drafter = Drafter(model, layer(model.config, model.config.layer_types.index("full_attention")))
    pieces = {
        "mtp.pre_fc_norm_embedding.weight": drafter.embedding_norm,
        "mtp.pre_fc_norm_hidden.weight": drafter.hidden_norm,
        "mtp.fc.weight": drafter.projection,
        "mtp.norm.weight": drafter.final_norm,
    }
    inside = {f"mtp.layers.0.{name}": value for name, value in layer_tensors(drafter.layer).items()}
    counted = "num_nextn_predict_layers" if case == "qwen3-next" else "mtp_num_hidden_layers"
    add_to_folder(tmp_path, pieces | inside, **{counted: 1})
    check(tmp_path, drafter, blank_first=False, zero_centered=True)


def check(folder: Path, drafter: Drafter, **convention: bool) -> None:
    """Logits of every sample, and every tensor of the folder in the export."""
    ids = [s.token_ids.tolist() for s in sequences(5)]
    with engine(HfFolder.open(folder), train=False, mtp=MtpConfig(mode="load", repeat=2)) as trainer:
        _, *mtp = packed_logits(trainer, ids, 2)
        stream = [(name, value.clone()) for name, value in trainer.export()]
    exported = dict(stream)
    assert len(exported) == len(stream), "each name once"
    result = [torch.cat([first[:-1], second[:-2]]) for first, second in zip(*mtp, strict=True)]
    assert_like(result, lambda: [drafter.logits(sample, **convention) for sample in ids], [drafter.model, drafter])
    saved = load_file(folder / "model.safetensors")
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
