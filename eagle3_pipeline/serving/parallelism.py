"""Whether a target can be served as a recipe splits it, judged by its config.json before anything starts.

vLLM says the same after half a minute of imports, or after loading. What vLLM 0.32 demands, and where:

    attention heads % tensor_parallel == 0
        vllm/config/model.py, verify_with_parallel_config
    key/value heads % tensor_parallel == 0, or the other way round, when they are copied
        vllm/model_executor/layers/linear.py, QKVParallelLinear. MLA (kv_lora_rank) has none to split: its
        attention in models/deepseek_v2.py asks for the attention heads only.
    vocabulary, filled up to a multiple of 64, % tensor_parallel == 0
        vllm/model_executor/layers/vocab_parallel_embedding.py
    width of an expert % (tensor_parallel x data_parallel) == 0, without expert_parallel
        vllm/model_executor/layers/fused_moe/config.py, FusedMoEConfig
    experts > 0 with expert_parallel
        vllm/config/model.py, _verify_with_expert_parallelism
    max_model_len <= context of the model
        vllm/config/model.py, _get_and_verify_max_len

Two rules go further than vLLM:

    experts % (tensor_parallel x data_parallel) == 0 with expert_parallel
        vLLM demands it with EPLB, redundant experts included (fused_moe/layer.py), and of some models. Else
        fused_moe/expert_map_manager.py gives some ranks one expert more, and the fullest rank sets pace and
        memory of all. With --eplb-config it is left to vLLM.
    pipeline_parallel <= layers
        vllm/distributed/utils.py, get_pp_indices, would make stages without layers.

What a config does not say is not judged: classes of models have defaults of their own.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from eagle3_pipeline.errors import RecipeError
from eagle3_pipeline.model_folder import language_part
from eagle3_pipeline.recipe.extras import flag_in

if TYPE_CHECKING:
    from eagle3_pipeline.recipe.server import ServerSettings

# The names that vllm/transformers_utils/model_arch_config_convertor.py looks for, in its order.
_KV_HEADS = (
    *("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num"),
    "num_attention_groups",
)
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_CONTEXT = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
# Of these types the context in the config is the stretched one already.
_STRETCHED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
_VOCABULARY_BLOCK = 64
_ANOTHER_CONFIG = ("--hf-overrides", "--hf-config-path")
_LONGER_VARIABLE = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def check_parallel(settings: "ServerSettings", config: Mapping[str, Any], phase: str) -> None:
    """Raise RecipeError, with the valid values, where the target of `config` cannot be served like this.

    `config` is the target's config.json; multimodal ones nest the language model.
    """
    if any(flag_in(argument, _ANOTHER_CONFIG) for argument in settings.extra_args):
        return  # vLLM sees another config than this one
    text = language_part(config)
    _check_tensor(settings, text, phase)
    _check_experts(settings, text, phase)
    layers = _number(text, "num_hidden_layers")
    if layers is not None and settings.pipeline_parallel > layers:
        raise RecipeError(
            f"server.{phase}.pipeline_parallel is {settings.pipeline_parallel}, more than the target's "
            f"{layers} layers: use at most {layers}."
        )
    _check_context(settings, text, phase)


def _check_tensor(settings: "ServerSettings", text: Mapping[str, Any], phase: str) -> None:
    rules = list(_rules_of_tensor(settings, text))
    size = settings.tensor_parallel
    for what, fits in rules:
        if not fits(size):
            largest = _number(text, "num_attention_heads") or size
            valid = [n for n in range(1, largest + 1) if all(fits(n) for _, fits in rules)]
            raise RecipeError(
                f"server.{phase}.tensor_parallel is {size}, over which {what} cannot be split evenly. "
                f"Valid values for this target: {_listed(valid)}."
            )


def _rules_of_tensor(
    settings: "ServerSettings", text: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[int], bool]]]:
    """What has to be split, in words, and whether it can be over a number of ranks."""
    if heads := _number(text, "num_attention_heads"):
        yield f"{heads} attention heads", _divides(heads)
    kv_heads = _first(text, _KV_HEADS)
    if kv_heads and text.get("kv_lora_rank") is None:
        yield f"{kv_heads} key/value heads", _divides_or_copies(kv_heads)
    if vocabulary := _number(text, "vocab_size"):
        rows = math.ceil(vocabulary / _VOCABULARY_BLOCK) * _VOCABULARY_BLOCK
        yield f"a vocabulary of {vocabulary} (filled up to {rows})", _divides(rows)
    width = _number(text, "moe_intermediate_size")
    if width and _experts(text) and not settings.expert_parallel:
        copies = settings.data_parallel
        also = f", with data_parallel {copies}" if copies > 1 else ""
        yield f"experts of width {width} (without expert_parallel{also})", _divides(width, copies)


def _divides(total: int, copies: int = 1) -> Callable[[int], bool]:
    return lambda size: total % (size * copies) == 0


def _divides_or_copies(total: int) -> Callable[[int], bool]:
    return lambda size: total % size == 0 or size % total == 0


def _check_experts(settings: "ServerSettings", text: Mapping[str, Any], phase: str) -> None:
    if not settings.expert_parallel:
        return
    experts = _experts(text)
    if not experts:
        raise RecipeError(
            f"server.{phase}.expert_parallel is set, but the target is dense: its config.json names no "
            f"experts ({', '.join(_EXPERTS)}). Valid value: false."
        )
    ranks = settings.tensor_parallel * settings.data_parallel
    balanced = any(flag_in(argument, ("--eplb-config",)) for argument in settings.extra_args)
    if experts % ranks and not balanced:
        valid = [n for n in range(2, experts + 1) if experts % n == 0]
        raise RecipeError(
            f"server.{phase}: {experts} experts cannot be spread evenly over {ranks} ranks (tensor_parallel "
            f"x data_parallel). Valid numbers of ranks for this target: {_listed(valid)}; or leave "
            "expert_parallel out, which splits each expert."
        )


def _check_context(settings: "ServerSettings", text: Mapping[str, Any], phase: str) -> None:
    wanted, context = settings.max_model_len, _context(text)
    allowed = settings.extra_env.get(_LONGER_VARIABLE, os.environ.get(_LONGER_VARIABLE, "0"))
    if wanted is None or context is None or wanted <= context or allowed.strip().lower() in ("1", "true"):
        return
    raise RecipeError(
        f"server.{phase}.max_model_len is {wanted}, more than the target's context of {context} tokens: "
        f"use at most {context}, or leave it out."
    )


def _context(text: Mapping[str, Any]) -> int | None:
    """The longest sequence that vLLM serves by itself; None where the config does not say."""
    known = [value for key in _CONTEXT if (value := _number(text, key)) is not None]
    if not known:
        return None
    context = _number(text, "model_max_length") or min(known)
    if "gemma3" in str(text.get("model_type")):
        return context
    factors = [_factor(rope) for rope in _ropes(text)]
    return int(context * max([1.0, *factors]))


def _ropes(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """How positions are stretched: one mapping, or one for each kind of layer."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if isinstance(rope, Mapping):
        nested = [value for value in rope.values() if isinstance(value, Mapping)]
        yield from nested or [rope]


def _factor(rope: Mapping[str, Any]) -> float:
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    return float(factor) if isinstance(factor, int | float) and kind not in _STRETCHED else 1.0


def _experts(text: Mapping[str, Any]) -> int:
    """The number of routed experts, 0 in a dense model; layers may differ, then the most."""
    for name in _EXPERTS:
        value = text.get(name)
        if isinstance(value, list):
            value = max(value, default=0)
        if value:
            return int(value)
    blocks = [block for block in text.get("block_configs") or [] if isinstance(block, Mapping)]
    return max((int(block.get("n_routed_experts") or 0) for block in blocks), default=0)


def _first(text: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((value for name in names if (value := _number(text, name)) is not None), None)


def _number(text: Mapping[str, Any], name: str) -> int | None:
    value = text.get(name)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _listed(values: list[int]) -> str:
    return ", ".join(str(value) for value in values) or "none"
