"""The three tensors of the target that a draft needs, read from its safetensors without loading the model.

    embedding  [V, H]   the draft's token embedding, frozen
    head       [V, H]   verifier logits, and what the draft's own head starts from
    norm       [H]      the final norm before the head (hidden states are stored before it)

V tokens of the target, hidden size H.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.model_folder import weight_files

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
# Endings of the names under which model families keep them; the shortest name that matches is the model's
# own.
_EMBEDDING = ("embed_tokens.weight", "tok_embeddings.weight", "embed.weight", "wte.weight")
_HEAD = ("lm_head.weight", "output.weight", "unembed.weight")
_NORM = ("model.norm.weight", "norm_f.weight", "ln_f.weight", "norm.weight")
# transformers computes `x * (1 + w)` in the final norm of these families, `x * w` in all others.
_ONE_PLUS_WEIGHT = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_text", "recurrent_gemma")


@dataclass(frozen=True)
class TargetWeights:
    """The tensors as the target stores them; `head` is `embedding` where the target ties them."""

    embedding: "torch.Tensor"
    head: "torch.Tensor"
    norm: "torch.Tensor"
    config: dict[str, Any]
    """The language model's part of config.json."""
    architectures: tuple[str, ...]


def read_target_weights(model: Path) -> TargetWeights:
    """Read embedding, head and final norm of the model in `model`; raises BadInput."""
    whole = json.loads((model / "config.json").read_text())
    config = whole.get("text_config") or whole
    files = _files_by_tensor(model)
    embedding = _read(model, files, _EMBEDDING)
    norm = _read(model, files, _NORM)
    tied = config.get("tie_word_embeddings", whole.get("tie_word_embeddings", False))
    head = embedding if tied or _find(files, _HEAD) is None else _read(model, files, _HEAD)
    if embedding.shape != head.shape or norm.shape != embedding.shape[1:]:
        raise BadInput(
            f"{model}: embedding {list(embedding.shape)}, head {list(head.shape)} and final norm "
            f"{list(norm.shape)} do not belong together, or are quantized: a draft needs all three "
            "unquantized"
        )
    if config.get("model_type") in _ONE_PLUS_WEIGHT:
        norm = norm.float() + 1
    return TargetWeights(embedding, head, norm, config, tuple(whole.get("architectures") or ()))


def _files_by_tensor(model: Path) -> dict[str, str]:
    from safetensors import safe_open

    index = model / INDEX_NAME
    if index.is_file():
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return files
    found: dict[str, str] = {}
    for path in weight_files(model):
        with safe_open(path, framework="pt") as weights:
            found.update(dict.fromkeys(weights.keys(), path.name))
    return found


def _find(files: dict[str, str], endings: tuple[str, ...]) -> str | None:
    for ending in endings:
        matches = [name for name in files if name == ending or name.endswith("." + ending)]
        if matches:
            return min(matches, key=len)
    return None


def _read(model: Path, files: dict[str, str], endings: tuple[str, ...]) -> "torch.Tensor":
    from safetensors import safe_open

    name = _find(files, endings)
    if name is None:
        raise BadInput(
            f"{model} has no tensor called ...{endings[0]} in its safetensors: the draft cannot use it"
        )
    with safe_open(model / files[name], framework="pt") as weights:
        tensor: torch.Tensor = weights.get_tensor(name)
    if not tensor.dtype.is_floating_point:
        raise BadInput(f"{model}: {name} is {tensor.dtype}, expected an unquantized float tensor")
    return tensor
