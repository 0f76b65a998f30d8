"""One part of a shard: samples in the form in which they are stored, and how they are written.

A part is written under a temporary name, fsynced, and then renamed: one that has its name is complete.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from eagle3_pipeline.durable_files import fsync_folder
from eagle3_pipeline.shards.format import ShardLayout, encode_header, tensors_of
from eagle3_pipeline.shards.precision import quantise

_SCALES_OF = {"hidden_states": "scales", "last_states": "last_scales"}
_STEP_BYTES = 64 << 20  # written at once: keeps a kill and other writers responsive


@dataclass(frozen=True)
class StoredSample:
    """A sample as it stands in a part."""

    sample_id: str
    tensors: dict[str, torch.Tensor]
    """By their names in the part; all but the offsets."""

    @property
    def tokens(self) -> int:
        return len(self.tensors["token_ids"])

    @property
    def trained_tokens(self) -> int:
        """Rows of the last layer that are kept apart from the others."""
        return len(self.tensors.get("last_states", ()))


@dataclass(frozen=True)
class Written:
    """A part that is on the disk."""

    bytes: int
    sha256: str
    sample_ids: tuple[str, ...]
    tokens: int


def as_stored(
    layout: ShardLayout, states: torch.Tensor, token_ids: torch.Tensor, loss_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The tensors of one sample as they stand in a part, none of them the caller's.

    states [tokens, layers, hidden] bf16, token_ids [tokens], loss_mask [tokens].
    """
    mask = loss_mask.to(torch.bool, copy=True)
    stored = {"token_ids": token_ids.to(torch.int64, copy=True), "loss_mask": mask}
    kept = {"hidden_states": states}
    if layout.kept == "trained":
        kept = {"hidden_states": states[:, :-1], "last_states": states[mask, -1]}
    for name, rows in kept.items():
        if layout.precision == "fp8":
            stored[name], stored[_SCALES_OF[name]] = quantise(rows)
        else:
            stored[name] = rows.clone(memory_format=torch.contiguous_format)
    return stored


def write_part(path: Path, layout: ShardLayout, samples: Sequence[StoredSample]) -> Written:
    """Write a part to `path`, where there is none yet; raises OSError, and then leaves nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    sample_ids = tuple(sample.sample_id for sample in samples)
    tokens = sum(sample.tokens for sample in samples)
    trained = sum(sample.trained_tokens for sample in samples)
    try:
        with temporary.open("wb") as file:
            hashed = _Hashed(file)
            hashed.write(encode_header(layout, sample_ids, tokens, trained))
            for name in tensors_of(layout, len(sample_ids), tokens, trained):
                _write_rows(hashed, name, samples)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)
    return Written(size, hashed.sha256, sample_ids, tokens)


class _Hashed:
    """A file whose checksum is known when it is written: a whole shard is not read again at its end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self._file.write(data)

    @property
    def sha256(self) -> str:
        """Hex digest of what was written so far."""
        return self._digest.hexdigest()


def _write_rows(file: _Hashed, name: str, samples: Sequence[StoredSample]) -> None:
    if name in ("offsets", "last_offsets"):
        is_last = name == "last_offsets"
        lengths = [sample.trained_tokens if is_last else sample.tokens for sample in samples]
        _write_tensor(file, torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0))
        return
    for sample in samples:
        _write_tensor(file, sample.tensors[name])


def _write_tensor(file: _Hashed, tensor: torch.Tensor) -> None:
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    for start in range(0, len(data), _STEP_BYTES):
        file.write(data[start : start + _STEP_BYTES])
