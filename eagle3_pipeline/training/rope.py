"""Rotary settings of a model config, whichever form it has them in, as transformers 5 writes them."""

import copy
from collections.abc import Mapping
from typing import Any

_THETA = 10000.0  # transformers' default
# What vLLM reads as the share of a head that is rotated, in the rotary settings or beside them.
_SHARES = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
_SIZE = "rope_dim"


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a target's or a draft's config (as a dict), for a draft.

    transformers 4 kept `rope_theta` and `rope_scaling` apart. Settings per layer type become those of
    full attention. A draft's heads are rotated whole: transformers' Llama and Qwen3, which are trained, know
    nothing else, and vLLM would serve a share that stood here.
    """
    rope = _found(config)
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = config.get("rope_theta") or _THETA
    rope.setdefault("rope_type", rope.pop("type", "default"))
    # Multimodal targets rotate parts of a head by image coordinates; text positions are all the same.
    if rope["rope_type"] == "mrope" or "mrope_section" in rope:
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {name: value for name, value in rope.items() if name not in (*_SHARES, _SIZE)}


def rotates_partly(config: Mapping[str, Any]) -> bool:
    """Whether a draft of this config (as a dict) is served with only a part of each head rotated."""
    rope = _found(config)
    shares = (rope.get(name, config.get(name)) for name in _SHARES)
    return any(share not in (None, 1) for share in shares) or rope.get(_SIZE) not in (
        None,
        config.get("head_dim"),
    )


def _found(config: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = copy.deepcopy(config.get("rope_parameters") or {})
    if "full_attention" in rope:
        rope = rope["full_attention"]
    return rope or copy.deepcopy(config.get("rope_scaling") or {})
