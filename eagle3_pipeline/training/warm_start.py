"""Starting from a pretrained draft: its config read, its tensors renamed by rule, every one accounted for.

A tensor that finds no place, or a place that finds no tensor, is an error: a draft that is half loaded
trains without complaint, as if from scratch.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.target_weights import TargetWeights
from eagle3_pipeline.training.rope import rope_parameters

# The names of the EAGLE-3 authors' code and of SpecForge on the left, speculators' on the right.
RENAMED = (("midlayer.", "layers.0."),)
_WRAPPER = "model."
# Not weights: the vocabulary map is kept by vocabulary_map, frequencies are computed from the config.
_LEFT_OUT = ("d2t", "t2d", "layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")
_OPTIONAL = ("embed_tokens.weight",)
_NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def read_base_config(
    base: Path, weights: TargetWeights, layers: tuple[int, ...]
) -> tuple[PretrainedConfig, dict[str, bool]]:
    """Layer config and norm flags of the base draft; raises BadInput if it draws on other layers."""
    config = json.loads((base / "config.json").read_text())
    nested = config.get("eagle_config") or {}
    ids = nested.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:  # vLLM's rule for drafts that do not say it
        depth = int(weights.config["num_hidden_layers"])
        ids = [2, depth // 2, depth - 3]
    if tuple(ids) != layers:
        raise BadInput(
            f"the base draft {base} draws on the layers {list(ids)}, extraction.layers has {list(layers)} "
            f"before the last: set it to {[*ids, int(weights.config['num_hidden_layers'])]}"
        )
    shape = config.get("transformer_layer_config") or config
    wanted = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("hidden_act", "attention_bias", "initializer_range", "rms_norm_eps"),
        "max_position_embeddings",
    )
    values = {name: shape[name] for name in wanted if shape.get(name) is not None}
    kind = Qwen3Config if shape.get("model_type") == "qwen3" else LlamaConfig
    layer = kind(
        **values,
        rope_parameters=rope_parameters(shape),
        vocab_size=weights.config["vocab_size"],
        num_hidden_layers=1,
        tie_word_embeddings=False,
        pad_token_id=None,
        num_aux_hidden_states=len(layers),
        dtype="bfloat16",
    )
    return layer, {flag: bool(nested.get(flag, config.get(flag, False))) for flag in _NORM_FLAGS}


def load_base(model: Any, base: Path) -> None:
    """Put all weights of the base draft into the model; raises BadInput with all that does not fit."""
    tensors = read_renamed(base)
    places: dict[str, Tensor] = {
        name: one for name, one in model.named_parameters() if not name.startswith("verifier_")
    }
    missing = sorted(set(places) - set(tensors) - set(_OPTIONAL))
    strange = sorted(set(tensors) - set(places))
    shapes = [
        f"{name} {list(tensors[name].shape)} for {list(place.shape)}"
        for name, place in sorted(places.items())
        if name in tensors and tensors[name].shape != place.shape
    ]
    if missing or strange or shapes:
        raise BadInput(
            f"the base draft {base} does not fit: missing {missing or 'nothing'}, unknown "
            f"{strange or 'nothing'}, other shapes {shapes or 'none'}. Known renamings: {dict(RENAMED)}. "
            "Take another base draft, or none."
        )
    with torch.no_grad():
        for name, value in tensors.items():
            places[name].copy_(value)


def read_renamed(base: Path) -> dict[str, Tensor]:
    """The weights of a draft folder under speculators' names; raises BadInput if two want the same name."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            for found in weights.keys():  # noqa: SIM118 - it is no dict
                name = renamed(found)
                if name in _LEFT_OUT:
                    continue
                if name in tensors:
                    raise BadInput(f"the base draft {base} has two tensors for {name}, one of them {found}")
                tensors[name] = weights.get_tensor(found)
    return tensors


def renamed(name: str) -> str:
    """A tensor's name in speculators' draft."""
    name = name.removeprefix(_WRAPPER)
    for old, new in RENAMED:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
