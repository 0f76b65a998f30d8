"""Does the config of a draft say what it was trained with?

A draft with a wrong config serves without any error and is accepted one time in a hundred. So whatever vLLM
would fill in by itself has to be there, and all of it as it was in training:

    speculators_model_type eagle3, eagle_aux_hidden_state_layer_ids, the four norm flags, draft_vocab_size,
    target_hidden_size, speculators_config {proposal_methods, verifier}, transformer_layer_config
"""

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3_pipeline.release.expected import KINDS, SPECIAL_IDS, Expected

# What vLLM 0.32 builds fc for, unless transformer_layer_config.num_aux_hidden_states says otherwise.
_DEFAULT_AUX = 3


def config_problems(config: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    """What is wrong with the config, one line each."""
    layer = config.get("transformer_layer_config") or {}
    wanted = {
        "speculators_model_type": "eagle3",
        "eagle_aux_hidden_state_layer_ids": list(expected.aux_layers),
        "draft_vocab_size": expected.draft_tokens,
        "target_hidden_size": expected.hidden_size,
    }
    for key, right in wanted.items():
        if (found := config.get(key)) != right:
            yield f"config {key} is {found}, expected {right}"
    if not config.get("architectures"):
        yield "config architectures is empty: vLLM would not know what to load"
    for flag, trained in expected.norms.items():
        if (is_on := config.get(flag)) is not trained:
            yield (
                f"config {flag} is {is_on}, it was trained with {trained}: vLLM would compute something else"
            )
    yield from _layer_problems(layer, expected)
    yield from _speculation_problems(config.get("speculators_config") or {}, expected)


def _layer_problems(layer: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    if layer.get("model_type") not in KINDS:
        yield f"config transformer_layer_config.model_type is {layer.get('model_type')}, vLLM serves {KINDS}"
    wanted = {"num_hidden_layers": 1, "vocab_size": expected.vocab_size, **expected.layer}
    for key, right in wanted.items():
        if (found := layer.get(key)) != right:
            yield f"config transformer_layer_config.{key} is {found}, expected {right}"
    rope = layer.get("rope_parameters") or {}
    for key, right in expected.rope.items():
        if (found := rope.get(key)) != right:
            yield (
                f"config transformer_layer_config.rope_parameters.{key} is {found}, it was trained with "
                f"{right}: vLLM would turn heads otherwise"
            )
    if (window := _window(layer)) != expected.window:
        yield (
            f"config transformer_layer_config has a window of {window}, it was trained with {expected.window}"
        )
    aux = len(expected.aux_layers)
    if (found := layer.get("num_aux_hidden_states", _DEFAULT_AUX)) != aux:
        yield (
            f"config transformer_layer_config.num_aux_hidden_states is {found}, or missing, which vLLM takes "
            f"for {_DEFAULT_AUX}: the draft draws on {aux} layers"
        )
    yield from _special_problems(layer, expected)


def _window(layer: Mapping[str, Any]) -> int | None:
    """Only `layer_types` counts, as in vLLM."""
    kinds = layer.get("layer_types") or ["full_attention"]
    return layer.get("sliding_window") if kinds[0] == "sliding_attention" else None


def _special_problems(layer: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    """A draft has no tokenizer of its own: ids of another one mean that it is of another target.

    It may leave the padding out: it never pads.
    """
    for name in SPECIAL_IDS:
        found, right = layer.get(name), expected.special_ids[name]
        if found != right and (found is not None or name != "pad_token_id"):
            yield f"config transformer_layer_config.{name} is {found}, the target's is {right}"


def _speculation_problems(speculation: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    methods = speculation.get("proposal_methods") or [{}]
    if not methods[0].get("speculative_tokens"):
        yield "config speculators_config.proposal_methods has no speculative_tokens"
    verifier = speculation.get("verifier") or {}
    if (name := verifier.get("name_or_path")) != expected.verifier:
        yield (
            f"config verifier.name_or_path is {name}, expected {expected.verifier}: it is a draft of another "
            "target, or names a path of one machine, which means nothing elsewhere"
        )
    if expected.architecture not in (found := verifier.get("architectures") or []):
        yield f"config verifier.architectures is {found}, expected [{expected.architecture}]"
