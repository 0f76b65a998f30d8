"""Rotary settings of a model config, whichever form it has them in, as transformers 5 writes them."""

import copy
from typing import Any

_THETA = 10000.0  # transformers' default


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a target's or a draft's config (as a dict).

    transformers 4 kept `rope_theta` and `rope_scaling` apart. Settings per layer type become those of
    full attention.
    """
    rope = copy.deepcopy(config.get("rope_parameters") or {})
    if "full_attention" in rope:
        rope = rope["full_attention"]
    if not rope:
        rope = copy.deepcopy(config.get("rope_scaling") or {})
        rope["rope_theta"] = config.get("rope_theta", _THETA)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    # Multimodal targets rotate parts of a head by image coordinates; text positions are all the same.
    if rope["rope_type"] == "mrope" or "mrope_section" in rope:
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return rope
