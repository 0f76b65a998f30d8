"""The output head of a model folder, read without torch: which last state says which token next.

A row of the head, divided by the final norm's weights, is a state whose norm points along that row; with
heads as the tests' models have them, the token of that row is then the likeliest by far.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_HEAD, _EMBEDDING, _NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
_DTYPES = {"BF16": np.uint16, "F32": np.float32}


@dataclass(frozen=True)
class SpokenHead:
    """Head `[V, H]` and final norm `[H]`, float32 or the bits of bfloat16, and the number of layers."""

    head: npt.NDArray[Any]
    norm: npt.NDArray[Any]
    num_layers: int

    def states_before(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """States `[tokens, H]` after which `token_ids` come; zeros for a token that the head never says."""
        rows = _float32(self.head[np.asarray(token_ids, dtype=np.int64)])
        states: npt.NDArray[np.float32] = rows / _float32(self.norm)
        return states


def head_of(model: Path) -> SpokenHead | None:
    """The head in `model`'s one safetensors file; None where there is none."""
    file, config = model / "model.safetensors", model / "config.json"
    if not (file.is_file() and config.is_file()):
        return None
    tensors = _memory_mapped(file)
    head, norm = tensors.get(_HEAD, tensors.get(_EMBEDDING)), tensors.get(_NORM)
    if head is None or norm is None:
        return None
    whole = json.loads(config.read_text())
    return SpokenHead(head, norm, int((whole.get("text_config") or whole)["num_hidden_layers"]))


def _memory_mapped(file: Path) -> dict[str, npt.NDArray[Any]]:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    return {
        name: np.memmap(
            file, _DTYPES[one["dtype"]], "r", 8 + size + one["data_offsets"][0], tuple(one["shape"])
        )
        for name, one in header.items()
        if name in (_HEAD, _EMBEDDING, _NORM) and one["dtype"] in _DTYPES
    }


def _float32(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 of float32, or of bfloat16 given as its bits."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values, dtype=np.float32)
