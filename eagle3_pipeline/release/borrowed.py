"""Is what a draft took over still what it took: the embedding, never trained, and a head that was not?

    embed_tokens.weight [V, H]   the base draft's where that has one, else the target's
    lm_head.weight [D, H]        where it is frozen: the base draft's, else the target's rows of its tokens

A draft of another target with the same sizes differs in nothing else, and would be accepted by chance.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.model_folder import is_whole
from eagle3_pipeline.release.draft_tensors import EMBEDDING
from eagle3_pipeline.release.expected import Expected
from eagle3_pipeline.target_weights import TargetWeights, read_target_weights
from eagle3_pipeline.training.base_tensors import BaseTensor, list_tensors
from eagle3_pipeline.vocabulary.base_mapping import read_base_mapping

if TYPE_CHECKING:
    import torch

_HEAD = "lm_head.weight"
_CHUNK_VALUES = 1 << 24


def borrowed_problems(draft: Path, expected: Expected) -> Iterator[str]:
    """What is not as it was taken over, one line each; of a draft whose tensors have their shapes.

    Raises MissingInput where the target is gone.
    """
    weights = target_of(expected.target)
    tensors = list_tensors(draft)
    base = list_tensors(expected.base) if expected.base is not None else {}
    if EMBEDDING in tensors:
        # A base draft's embedding went through the target's precision.
        own = base[EMBEDDING].read().to(weights.embedding.dtype) if EMBEDDING in base else None
        right, whose = (own, "the base draft's") if own is not None else (weights.embedding, "the target's")
        if (row := first_difference(tensors[EMBEDDING], right)) is not None:
            yield (
                f"{EMBEDDING} is not {whose} (they differ at token {row}), and it is never trained: is it a "
                f"draft of another target than {expected.target}?"
            )
    if not expected.head_is_trained:
        if _HEAD in base:
            right, whose = base[_HEAD].read(), "the base draft's"
        else:
            right, whose = weights.head[read_base_mapping(draft, expected.vocab_size)[1]], "the target's"
        if (row := first_difference(tensors[_HEAD], right)) is not None:
            yield f"{_HEAD} is not {whose} (they differ at row {row}), and was not to be trained"


def target_of(folder: Path) -> TargetWeights:
    """The tensors of the target that a draft may have of it; raises MissingInput where it is gone."""
    if not is_whole(folder):
        raise MissingInput(
            f"the target in {folder} is not there any more, or not whole: a draft cannot be held against it. "
            "Materialise target_model again."
        )
    return read_target_weights(folder)


def first_difference(tensor: BaseTensor, right: "torch.Tensor") -> int | None:
    """The first row in which a stored matrix is not `right` in bfloat16, or None; read in bounded chunks."""
    import torch
    from safetensors import safe_open

    if tensor.shape != tuple(right.shape):
        return 0
    rows = max(1, _CHUNK_VALUES // tensor.shape[1])
    with safe_open(tensor.file, framework="pt") as weights:
        piece = weights.get_slice(tensor.found_as)
        for start in range(0, tensor.shape[0], rows):
            there = right[start : start + rows].to(torch.bfloat16)
            differs = (piece[start : start + rows] != there).any(dim=1)
            if bool(differs.any()):
                return start + int(differs.nonzero()[0])
    return None
