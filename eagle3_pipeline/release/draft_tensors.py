"""Are the tensors of a draft those of its layout: all there, none besides, of their shapes and types, sound?

For A layers of a target with hidden size T and V tokens, and a draft of hidden size H with D tokens, an MLP
of width M, and Q and K rows of queries and of keys (heads x head_dim):

    fc.weight [H, A * T]   norm.weight [H]   lm_head.weight [D, H]
    layers.0.{hidden_norm, input_layernorm, post_attention_layernorm}.weight [H]
    layers.0.self_attn.{q, k, v, o}_proj.weight [Q, 2 H] [K, 2 H] [K, 2 H] [H, Q]
    layers.0.mlp.{gate, up, down}_proj.weight [M, H] [M, H] [H, M]
    d2t int64 [D], t2d bool [V]     where D < V
    embed_tokens.weight [V, H]      vLLM takes the target's where it is left out
    input_norm.weight [A * T]       with norm_before_fc
    fc_norm.k.weight [T]            with fc_norm, for each layer k
    layers.0.self_attn.{q, k}_norm.weight [head_dim]      of a qwen3 layer
    layers.0.self_attn.{q, k, v, o}_proj.bias             with attention_bias

Floats are bfloat16.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.release.expected import Expected

if TYPE_CHECKING:
    import torch

EMBEDDING = "embed_tokens.weight"
_MAP = {"d2t": "I64", "t2d": "BOOL"}
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_CHUNK_VALUES = 1 << 24


def tensor_problems(files: Sequence[Path], config: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    """What is wrong with the tensors in `files`, one line each."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[str, list[int]]] = {}
    mapping: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no dict
                    if name in found:
                        yield f"{name} is in {file.name} and in another file: vLLM would take either"
                    piece = tensors.get_slice(name)
                    found[name] = (piece.get_dtype(), piece.get_shape())
                    if name in _MAP:
                        mapping[name] = tensors.get_tensor(name)
                    elif problem := _value_problem(piece):
                        yield f"{name} {problem}"
        except (OSError, SafetensorError) as error:
            yield f"{file.name} cannot be read ({error})"
    yield from _place_problems(found, config, expected)
    yield from _mapping_problems(mapping, expected)


def draft_shapes(config: Mapping[str, Any], expected: Expected) -> dict[str, list[int]]:
    """The shape of each tensor that a draft of this config has, its embedding included, in vLLM's names."""
    layer = config["transformer_layer_config"]
    hidden, width, heads, key_heads, head = (int(layer[name]) for name in _SIZES)
    joined = len(expected.aux_layers) * expected.hidden_size
    rows = {"q": heads * head, "k": key_heads * head, "v": key_heads * head, "o": hidden}
    columns = {"q": 2 * hidden, "k": 2 * hidden, "v": 2 * hidden, "o": heads * head}
    attention = "layers.0.self_attn"
    shapes = {
        EMBEDDING: [expected.vocab_size, hidden],
        "fc.weight": [hidden, joined],
        "norm.weight": [hidden],
        "lm_head.weight": [expected.draft_tokens, hidden],
        "layers.0.hidden_norm.weight": [hidden],
        "layers.0.input_layernorm.weight": [hidden],
        "layers.0.post_attention_layernorm.weight": [hidden],
        **{f"{attention}.{one}_proj.weight": [rows[one], columns[one]] for one in rows},
        "layers.0.mlp.gate_proj.weight": [width, hidden],
        "layers.0.mlp.up_proj.weight": [width, hidden],
        "layers.0.mlp.down_proj.weight": [hidden, width],
    }
    if expected.draft_tokens != expected.vocab_size:
        shapes |= {"d2t": [expected.draft_tokens], "t2d": [expected.vocab_size]}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = [joined]
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{k}.weight": [expected.hidden_size] for k in range(len(expected.aux_layers))}
    if layer.get("model_type") == "qwen3":
        shapes |= {f"{attention}.{one}_norm.weight": [head] for one in "qk"}
    if layer.get("attention_bias"):
        shapes |= {f"{attention}.{one}_proj.bias": [rows[one]] for one in rows}
    return shapes


def _place_problems(
    found: Mapping[str, tuple[str, list[int]]], config: Mapping[str, Any], expected: Expected
) -> Iterator[str]:
    layer = config.get("transformer_layer_config") or {}
    if unsaid := [name for name in _SIZES if type(layer.get(name)) is not int]:
        yield f"config transformer_layer_config does not say {', '.join(unsaid)}: its tensors fit nothing"
        return
    wanted = draft_shapes(config, expected)
    if EMBEDDING not in found and layer["hidden_size"] != expected.hidden_size:
        yield f"{EMBEDDING} is missing, and the target's is not {layer['hidden_size']} wide"
    for name, shape in wanted.items():
        if name not in found:
            if name not in (EMBEDDING, *_MAP):
                yield f"{name} is missing, expected {shape}"
            continue
        dtype, found_shape = found[name]
        if found_shape != shape:
            yield f"{name} is {found_shape}, expected {shape}"
        if dtype != (right := _MAP.get(name, "BF16")):
            yield f"{name} is of type {dtype}, expected {right}"
    if unknown := sorted(set(found) - set(wanted)):
        yield (
            f"{', '.join(unknown)}: no part of the draft that the config describes. vLLM would leave that "
            "out, or refuse to load"
        )


def _mapping_problems(mapping: "Mapping[str, torch.Tensor]", expected: Expected) -> Iterator[str]:
    from eagle3_pipeline.vocabulary.mapping import verify_mapping

    if expected.draft_tokens == expected.vocab_size:
        return
    if missing := [name for name in _MAP if name not in mapping]:
        yield (
            f"{' and '.join(missing)} missing, although the draft has {expected.draft_tokens} of the "
            f"target's {expected.vocab_size} tokens"
        )
        return
    if mapping["d2t"].dim() != 1:  # which its shape says already
        return
    try:
        verify_mapping(mapping["d2t"], mapping["t2d"], expected.vocab_size)
    except DamagedFile as error:
        yield str(error)


def _value_problem(piece: Any) -> str | None:
    """Why the values of a tensor cannot be weights, or None; read in bounded chunks of rows.

    A matrix whose values are all the same was never filled. A vector may be: a norm starts as ones.
    """
    shape = piece.get_shape()
    if not shape or not math.prod(shape):
        return f"is empty: {shape}"
    rows = max(1, _CHUNK_VALUES // max(1, math.prod(shape[1:])))
    low, high = math.inf, -math.inf
    for start in range(0, shape[0], rows):
        values = piece[start : start + rows].float()
        if not bool(values.isfinite().all()):
            return "has values that are not finite"
        low, high = min(low, float(values.min())), max(high, float(values.max()))
    if low == high and (math.prod(shape[1:]) > 1 or low == 0):
        return f"is {low:g} everywhere"
    return None
