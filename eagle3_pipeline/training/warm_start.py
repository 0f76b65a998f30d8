"""Starting from a pretrained draft: a layer of its shape, its weights in it, every tensor accounted for.

base_config.py says what its config means, base_tensors.py how its tensors are named.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.target_weights import TargetWeights
from eagle3_pipeline.training.base_config import attention_of, layer_of, norm_flags, read_config
from eagle3_pipeline.training.base_tensors import list_tensors, require_fit
from eagle3_pipeline.training.draft import speculator_config
from eagle3_pipeline.training.rope import rope_parameters

_KEPT = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "attention_bias", "initializer_range", "rms_norm_eps", "max_position_embeddings"),
)


def read_base_config(
    base: Path, weights: TargetWeights, layers: tuple[int, ...]
) -> tuple[PretrainedConfig, dict[str, bool]]:
    """Layer config and norm flags of the base draft, for a draft that draws on `layers`.

    Raises BadInput where it is one for a target of other sizes.
    """
    config = read_config(base)
    shape = layer_of(config)
    values = {name: shape[name] for name in _KEPT if shape.get(name) is not None}
    kind = Qwen3Config if shape.get("model_type") == "qwen3" else LlamaConfig
    try:
        layer = kind(
            **values,
            **attention_of(base, shape),
            rope_parameters=rope_parameters(shape),
            vocab_size=shape.get("vocab_size") or weights.config["vocab_size"],
            num_hidden_layers=1,
            tie_word_embeddings=False,
            bos_token_id=weights.config.get("bos_token_id"),
            eos_token_id=weights.config.get("eos_token_id"),
            pad_token_id=None,
            num_aux_hidden_states=len(layers),
            dtype="bfloat16",
        )
    except BadInput:
        raise
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise BadInput(
            f"{base / 'config.json'} describes no layer that can be built ({error}). Take another base "
            "draft, or none."
        ) from error
    for name in ("hidden_size", "vocab_size"):
        if getattr(layer, name) != weights.config[name]:
            raise BadInput(
                f"the base draft {base} has {name} {getattr(layer, name)}, the target "
                f"{weights.config[name]}. It is a draft of another target: take another base draft, or none."
            )
    return layer, norm_flags(config)


def load_base(model: Any, base: Path) -> None:
    """Put all weights of the base draft into the model; raises BadInput with all that does not fit."""
    tensors = list_tensors(base)
    places = _places(model)
    require_fit(base, tensors, {name: tuple(one.shape) for name, one in places.items()}, _optional(model))
    with torch.no_grad():
        for name, tensor in tensors.items():
            places[name].copy_(tensor.read())


def require_base_fits(
    base: Path, target: Mapping[str, Any], layers: tuple[int, ...], draft_tokens: int
) -> None:
    """Raise BadInput where `load_base` would, from names and shapes alone; `target` is its config."""
    from speculators.models.eagle3 import Eagle3DraftModel

    with torch.device("meta"):
        size, hidden = int(target["vocab_size"]), int(target["hidden_size"])
        embedding = torch.empty(size, hidden)
        weights = TargetWeights(embedding, embedding, torch.empty(hidden), dict(target), ())
        layer, norms = read_base_config(base, weights, layers)
        model = Eagle3DraftModel(
            speculator_config(
                layer,
                weights,
                target_name="",
                aux_layers=layers,
                draft_tokens=draft_tokens,
                speculative_tokens=1,
                norms=norms,
            )
        )
    shapes = {name: tuple(one.shape) for name, one in _places(model).items()}
    require_fit(base, list_tensors(base), shapes, _optional(model))


def _places(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: one for name, one in model.named_parameters() if not name.startswith("verifier_")}


def _optional(model: Any) -> frozenset[str]:
    """What is the target's where a draft leaves it out; a head only where it has the same rows."""
    return frozenset({"embed_tokens.weight"} | (set() if model.use_draft_vocab else {"lm_head.weight"}))
