"""Is the draft's folder what was trained, and will vLLM serve it as it was trained?

A draft with a wrong config serves without any error and is accepted one time in a hundred, so whatever vLLM
fills in by itself when it is missing has to be there and right. The layout is that of speculators 0.9, for
A aux layers of a target with hidden size T and V tokens, and a draft with hidden size H and D tokens:

    config.json         speculators_model_type eagle3, eagle_aux_hidden_state_layer_ids [A], norm flags,
                        draft_vocab_size D, speculators_config {proposal_methods, verifier},
                        transformer_layer_config {hidden_size H, vocab_size V, rope_parameters}
    model.safetensors   fc.weight [H, A * T], layers.0.*, norm.weight [H], lm_head.weight [D, H],
                        d2t int64 [D] and t2d bool [V] where D < V,
                        embed_tokens.weight [V, H] (vLLM takes the target's where it is left out)
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_pipeline.alternatives import chosen
from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.release.names import public_name

if TYPE_CHECKING:
    import torch

_NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_MODEL_TYPES = ("llama", "qwen3")  # the decoder layers that vLLM 0.32 takes for a speculators EAGLE-3 draft
# What vLLM 0.32 builds fc for, unless transformer_layer_config.num_aux_hidden_states says otherwise.
_DEFAULT_AUX = 3
_CHUNK_VALUES = 1 << 24


@dataclass(frozen=True)
class Expected:
    """What the draft was trained for, from the recipe and the manifests of what it was made from."""

    hidden_size: int
    vocab_size: int
    architecture: str
    aux_layers: tuple[int, ...]
    """Layer ids of the states that feed the draft."""
    draft_tokens: int
    verifier_names: frozenset[str | None]
    """Names under which the config may speak of the target."""

    @classmethod
    def of(cls, lineage: Lineage) -> "Expected":
        """What a draft of this lineage has to be; raises MissingInput."""
        target = lineage.target_model().require().facts
        settings = lineage.recipe.target
        name = public_name(settings)
        local = {None, settings.path.name, str(settings.path)} if settings.path is not None else set()
        return cls(
            hidden_size=target["hidden_size"],
            vocab_size=target["vocab_size"],
            architecture=target["architecture"],
            aux_layers=lineage.recipe.extraction.layers[:-1],
            draft_tokens=chosen(lineage).vocabulary_map().require().facts["draft_tokens"],
            verifier_names=frozenset({name} if name else local),
        )


def verify_draft(folder: Path, expected: Expected) -> None:
    """Raise DamagedFile with all that is wrong with the draft in `folder`; MissingInput if there is none."""
    config_path = folder / "config.json"
    weights = sorted(folder.glob("*.safetensors"))
    if not config_path.is_file() or not weights:
        raise MissingInput(
            f"{folder} has no config.json or no *.safetensors. Materialise draft_checkpoint again."
        )
    try:
        config = json.loads(config_path.read_text())
    except ValueError as error:
        raise DamagedFile(
            f"{config_path} is not JSON ({error}). Materialise draft_checkpoint again."
        ) from error
    problems = [*_config_problems(config, expected), *_weight_problems(weights, config, expected)]
    if problems:
        raise DamagedFile(
            f"the draft in {folder} is not what was trained for this target, and is not released:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + "\nA training of another version may have written it: materialise draft_checkpoint again."
        )


def _config_problems(config: dict[str, Any], expected: Expected) -> Iterator[str]:
    layer = config.get("transformer_layer_config") or {}
    wanted = {
        "speculators_model_type": (config.get("speculators_model_type"), "eagle3"),
        "eagle_aux_hidden_state_layer_ids": (
            config.get("eagle_aux_hidden_state_layer_ids"),
            list(expected.aux_layers),
        ),
        "draft_vocab_size": (config.get("draft_vocab_size"), expected.draft_tokens),
        "transformer_layer_config.vocab_size": (layer.get("vocab_size"), expected.vocab_size),
        "target_hidden_size": (
            config.get("target_hidden_size") or expected.hidden_size,
            expected.hidden_size,
        ),
    }
    for key, (found, right) in wanted.items():
        if found != right:
            yield f"config {key} is {found}, expected {right}"
    if not config.get("architectures"):
        yield "config architectures is empty: vLLM would not know what to load"
    if layer.get("model_type") not in _MODEL_TYPES:
        yield (
            f"config transformer_layer_config.model_type is {layer.get('model_type')}, vLLM serves "
            f"{_MODEL_TYPES}"
        )
    for flag in _NORM_FLAGS:
        if not isinstance(config.get(flag), bool):
            yield (
                f"config {flag} is {config.get(flag)}, expected true or false: vLLM would assume its own "
                "default"
            )
    if not isinstance((layer.get("rope_parameters") or layer).get("rope_theta"), int | float):
        yield "config transformer_layer_config has no rope_theta: vLLM would assume 10000"
    aux = len(expected.aux_layers)
    if layer.get("num_aux_hidden_states", _DEFAULT_AUX) != aux:
        yield (
            f"config transformer_layer_config.num_aux_hidden_states is not {aux}: vLLM would assume "
            f"{_DEFAULT_AUX}"
        )
    yield from _speculation_problems(config.get("speculators_config") or {}, expected)


def _speculation_problems(speculation: dict[str, Any], expected: Expected) -> Iterator[str]:
    methods = speculation.get("proposal_methods") or [{}]
    if not methods[0].get("speculative_tokens"):
        yield "config speculators_config.proposal_methods has no speculative_tokens"
    verifier = speculation.get("verifier") or {}
    name = verifier.get("name_or_path")
    if name not in expected.verifier_names:
        right = " or ".join(sorted(str(one) for one in expected.verifier_names))
        yield (
            f"config verifier.name_or_path is {name}, expected {right}: a path of one machine means nothing "
            "elsewhere"
        )
    if expected.architecture not in (verifier.get("architectures") or []):
        found = verifier.get("architectures")
        yield f"config verifier.architectures is {found}, expected [{expected.architecture}]"


def _weight_problems(files: list[Path], config: dict[str, Any], expected: Expected) -> Iterator[str]:
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, list[int]] = {}
    mapping: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no dict
                    piece = tensors.get_slice(name)
                    shapes[name] = piece.get_shape()
                    if name in ("d2t", "t2d"):
                        mapping[name] = tensors.get_tensor(name)
                    elif problem := _value_problem(piece):
                        yield f"{name} {problem}"
        except (OSError, SafetensorError) as error:
            yield f"{file.name} cannot be read ({error})"
    yield from _shape_problems(shapes, config, expected)
    yield from _mapping_problems(mapping, expected)


def _shape_problems(
    shapes: dict[str, list[int]], config: dict[str, Any], expected: Expected
) -> Iterator[str]:
    hidden = (config.get("transformer_layer_config") or {}).get("hidden_size")
    aux = len(expected.aux_layers)
    wanted = {
        "fc.weight": [hidden, aux * expected.hidden_size],
        "norm.weight": [hidden],
        "lm_head.weight": [expected.draft_tokens, hidden],
        "layers.0.hidden_norm.weight": [hidden],
    }
    if "embed_tokens.weight" in shapes:
        wanted["embed_tokens.weight"] = [expected.vocab_size, hidden]
    elif hidden != expected.hidden_size:
        yield f"embed_tokens.weight is missing, and the target's is not {hidden} wide"
    if config.get("norm_before_fc") is True:
        wanted["input_norm.weight"] = [aux * expected.hidden_size]
    if config.get("fc_norm") is True:
        wanted |= {f"fc_norm.{k}.weight": [expected.hidden_size] for k in range(aux)}
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            yield f"{name} is {shapes.get(name, 'missing')}, expected {shape}"
    for flag, prefix in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        if config.get(flag) is False and any(name.startswith(prefix) for name in shapes):
            yield f"{prefix}* was trained, but config {flag} is false: vLLM would leave it out"


def _mapping_problems(mapping: "dict[str, torch.Tensor]", expected: Expected) -> Iterator[str]:
    from eagle3_pipeline.vocabulary.mapping import verify_mapping

    missing = [name for name in ("d2t", "t2d") if name not in mapping]
    if missing:
        if expected.draft_tokens != expected.vocab_size:
            yield (
                f"{' and '.join(missing)} missing, although the draft has {expected.draft_tokens} of the "
                f"target's {expected.vocab_size} tokens"
            )
        return
    if len(mapping["d2t"]) != expected.draft_tokens:
        yield f"d2t has {len(mapping['d2t'])} offsets, expected {expected.draft_tokens}"
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
