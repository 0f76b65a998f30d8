"""What the config of a pretrained draft says, in each of the layouts that are about.

    speculators            transformer_layer_config (nested), ids and norm flags beside it
    SpecForge, SGLang      flat; ids in eagle_config.eagle_aux_hidden_state_layer_ids
    vLLM's own             flat; ids beside the rest
    the EAGLE-3 authors    flat, without ids

Layer ids are counted in two ways: id k is what enters layer k (the authors, vLLM, speculators, and here), or
what leaves layer k (SpecForge), which is our k + 1. `auto` decides by where the ids stand and what they are:

    no ids                           by input: 2, N // 2, N - 3, which the authors, vLLM and SGLang then take
    beside the rest                  by input: speculators and vLLM write them there; vLLM takes these first
    in eagle_config, begin with 1    by output, as SGLang reads them: SpecForge's 1, N // 2 - 1, N - 4
    in eagle_config, begin with 2    by input, as SGLang reads them: TorchSpec's 2, N // 2, N - 3
    in eagle_config, contain N       by input: no layer N has an output
    in eagle_config, others          cannot be known: base_draft.layers_counted must say it

N is the number of layers of the target.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.recipe.layers import from_output_of_layer
from eagle3_pipeline.recipe.models import LayersCounted
from eagle3_pipeline.training.norms import NORM_FLAGS
from eagle3_pipeline.training.rope import rotates_partly

_IDS = "eagle_aux_hidden_state_layer_ids"
_MAPPINGS = ("eagle_config", "transformer_layer_config", "rope_parameters", "rope_scaling")
_ANOTHER = "Take another base draft, or none."


def read_config(base: Path) -> dict[str, Any]:
    """config.json of the draft in `base`; raises BadInput where it is none that training knows."""
    path = base / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{path} cannot be read as JSON ({error}): copy or download the draft again"
        ) from error
    if not isinstance(config, dict):
        raise BadInput(f"{path} holds no mapping: it describes no draft. {_ANOTHER}")
    for name in _MAPPINGS:
        for part in (config, layer_of(config)):
            if not isinstance(part.get(name) or {}, dict):
                raise BadInput(f"{path} has {name} {part[name]!r}, expected a mapping. {_ANOTHER}")
    if unknown := _unknown(config):
        raise BadInput(f"the base draft {base} {unknown}, which training does not know. {_ANOTHER}")
    return config


def layer_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the decoder layer."""
    nested = config.get("transformer_layer_config")
    return nested if isinstance(nested, Mapping) and nested else config


def norm_flags(config: Mapping[str, Any]) -> dict[str, bool]:
    """The four flags, all explicit; False where the config does not say, as all trainers have it."""
    nested = config.get("eagle_config") or {}
    return {flag: bool(nested.get(flag, config.get(flag, False))) for flag in NORM_FLAGS}


def aux_layers(base: Path, config: Mapping[str, Any], depth: int, counted: LayersCounted) -> tuple[int, ...]:
    """The layers that feed the draft, each by what enters it; `depth` layers has the target.

    Raises BadInput where their numbering cannot be known.
    """
    beside = config.get(_IDS)
    found = beside or (config.get("eagle_config") or {}).get(_IDS)
    if not found:
        return (2, depth // 2, depth - 3)
    if not isinstance(found, list) or any(type(one) is not int for one in found):
        raise BadInput(f"the base draft {base} has {_IDS} {found!r}, expected whole numbers. {_ANOTHER}")
    ids = tuple(sorted(found))
    if counted == "auto":
        counted = "input" if beside else _numbering(base, ids, depth)
    return from_output_of_layer(ids) if counted == "output" else ids


def _numbering(base: Path, ids: tuple[int, ...], depth: int) -> LayersCounted:
    if ids[0] == 1:
        return "output"
    if ids[0] == 2 or depth in ids:
        return "input"
    raise BadInput(
        f"the base draft {base} draws on the layers {list(ids)} and does not say how they are counted. Set "
        f"base_draft.layers_counted: input for what enters these layers, output (SpecForge, SGLang) for what "
        f"leaves them, which are {list(from_output_of_layer(ids))} in extraction.layers"
    )


def require_layers(
    base: Path, depth: int, layers: tuple[int, ...], counted: LayersCounted
) -> tuple[int, ...]:
    """The draft's layers; raises BadInput unless they are `layers`, the states' but the last."""
    found = aux_layers(base, read_config(base), depth, counted)
    if found != layers:
        raise BadInput(
            f"the base draft {base} draws on the layers {list(found)}, extraction.layers has {list(layers)} "
            f"before the last: set it to {[*found, depth]}. If only their counting differs, set "
            "base_draft.layers_counted"
        )
    return found


def attention_of(base: Path, layer: Mapping[str, Any]) -> dict[str, Any]:
    """How far the draft looks back, as transformers' config has it: empty where it looks at all.

    Only `layer_types` counts, as in vLLM: a window that is merely named is never used.
    """
    kinds = layer.get("layer_types")
    kind = kinds[0] if kinds else "full_attention"
    if kind == "full_attention":
        return {}
    window = layer.get("sliding_window")
    if kind != "sliding_attention" or not window:
        raise BadInput(
            f"the base draft {base} has the attention {kind} with a window of {window}, expected "
            f"full_attention, or sliding_attention with a number. {_ANOTHER}"
        )
    return {"layer_types": [kind], "sliding_window": int(window), "use_sliding_window": True}


def _unknown(config: Mapping[str, Any]) -> str | None:
    """What of the draft would be lost in silence."""
    layer, nested = layer_of(config), config.get("eagle_config") or {}
    if config.get("quantization_config") or layer.get("quantization_config"):
        return "is quantized"
    if nested.get("use_aux_hidden_state") is False:
        return "takes no hidden states of middle layers (EAGLE-2)"
    if config.get("logit_scale", 1.0) not in (None, 1.0):
        return f"scales its logits by {config['logit_scale']}"
    if layer.get("num_hidden_layers", 1) != 1:
        return f"has {layer['num_hidden_layers']} decoder layers"
    if rotates_partly(layer):
        return "rotates only a part of each head (partial_rotary_factor, rope_dim)"
    flags = norm_flags(config)
    if flags["norm_before_fc"] and flags["fc_norm"]:
        return "has norm_before_fc and fc_norm at once"
    return None
