"""Writing one hidden-state shard: parts of bounded size, each complete before it has its name.

    <shard>/
        .part-00001.safetensors.tmp     being written
        part-00000.safetensors          complete
        parts.journal                   one line per complete part; gone when the shard has its manifest
        manifest.json                   written by the step, last

A part is written, fsynced, renamed, and then listed in the journal. A part that is not listed was
not finished, and one that is not what the journal says is damaged: the next writer removes both, and
their samples are made again.
"""

import hashlib
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch

from eagle3_pipeline.durable_files import Journal, fsync_folder
from eagle3_pipeline.errors import Busy
from eagle3_pipeline.manifest import MANIFEST_NAME
from eagle3_pipeline.shards.format import (
    ShardLayout,
    bytes_of_empty_part,
    bytes_of_sample,
    encode_header,
    read_header,
    tensors_of,
)
from eagle3_pipeline.shards.listing import JOURNAL_NAME, flaw_of
from eagle3_pipeline.shards.precision import quantise

_logger = logging.getLogger(__name__)
_SCALES_OF = {"hidden_states": "scales", "last_states": "last_scales"}
_STEP_BYTES = 64 << 20  # written at once: keeps a kill and other writers responsive


@dataclass(frozen=True)
class _Pending:
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


class ShardWriter:
    """Collects samples in memory and writes a part when the next sample would not fit.

    Holds at most one part (`part_bytes`) in memory. A sample larger than that makes a part of its own.
    """

    def __init__(
        self,
        folder: Path,
        layout: ShardLayout,
        part_bytes: int,
        fingerprint: str,
        *,
        note: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Open the shard at `folder`, or what a kill left of it; raises Busy, and DamagedFile for a journal.

        `fingerprint` is that of the thing that is written: parts of another one are not continued. A part
        that is cut, missing or of another layout is dropped with a warning; `done` lacks its samples.
        `note` is asked at each part for what the journal is to keep beside it: `notes` has those of parts
        that were there.
        """
        self.folder = folder
        self.layout = layout
        self._part_bytes = part_bytes
        self._note = note
        self._journal = Journal(folder / JOURNAL_NAME, fingerprint)
        self._pending: list[_Pending] = []
        self._pending_bytes = bytes_of_empty_part(layout)
        self.done: set[str] = set()
        self.tokens = 0
        self.parts: dict[Path, str] = {}
        """The finished parts, each with its SHA-256."""
        self.notes: list[dict[str, Any]] = []
        try:
            self._recover()
        except BaseException:
            self._journal.close()
            raise

    def _recover(self) -> None:
        if (self.folder / MANIFEST_NAME).exists():  # made while we waited for the lock: nothing here is ours
            raise Busy(
                f"{self.folder} was completed by another process just now. Start again: it is left as it is."
            )
        # A part that was dropped leaves its name to a later one: the last line about a name counts.
        for name, record in {record["part"]: record for record in self._journal.records}.items():
            path = self.folder / name
            if (flaw := flaw_of(path, record["bytes"], self.layout)) is not None:
                _logger.warning(f"{path} {flaw}: the samples in it are made again")
                continue
            header = read_header(path)
            self._list(path, record["sha256"], header.sample_ids, header.tokens)
            self.notes.append(record.get("note", {}))
        for path in self.folder.iterdir():
            if path not in self.parts and path.name.lstrip(".").startswith("part-"):
                path.unlink()

    def _list(self, path: Path, sha256: str, sample_ids: tuple[str, ...], tokens: int) -> None:
        self.parts[path] = sha256
        self.done.update(sample_ids)
        self.tokens += tokens

    def add(
        self, sample_id: str, hidden_states: torch.Tensor, token_ids: torch.Tensor, loss_mask: torch.Tensor
    ) -> None:
        """Take one sample; what the layout keeps of the tensors is copied.

        hidden_states [tokens, layers, hidden] bf16, token_ids [tokens], loss_mask [tokens]. Raises
        ValueError for other shapes (they were checked before), and OSError when a part cannot be written.
        """
        tokens = len(token_ids)
        expected = (tokens, len(self.layout.layer_ids), self.layout.hidden_size)
        if not tokens or tuple(hidden_states.shape) != expected or hidden_states.dtype != torch.bfloat16:
            raise ValueError(
                f"{sample_id}: {hidden_states.dtype} {tuple(hidden_states.shape)}, expected bf16 "
                f"{expected}, not empty"
            )
        if len(loss_mask) != tokens:
            raise ValueError(f"{sample_id}: a mask of {len(loss_mask)} for {tokens} tokens")
        sample = _Pending(sample_id, _as_stored(self.layout, hidden_states, token_ids, loss_mask))
        size = bytes_of_sample(sample_id, tokens, sample.trained_tokens, self.layout)
        if self._pending and self._pending_bytes + size > self._part_bytes:
            self._write_part()
        self._pending_bytes += size
        self._pending.append(sample)

    @property
    def pending_bytes(self) -> int:
        """Upper bound of the bytes of the part that is not written yet."""
        return self._pending_bytes

    def complete(self) -> dict[Path, str]:
        """Write what is left and return all parts with their SHA-256, for the manifest."""
        if self._pending:
            self._write_part()
        return dict(self.parts)

    def give_up(self) -> None:
        """Delete all parts, which are not to be trusted, so that the next writer begins anew."""
        # The journal first: after a kill in between nothing vouches for the parts, and they are removed.
        self._journal.path.unlink(missing_ok=True)
        fsync_folder(self.folder)
        for path in self.parts:
            path.unlink(missing_ok=True)

    def close(self, *, finished: bool = False) -> None:
        """Free the lock. With `finished` (the manifest stands) the journal has done its work and goes."""
        self._pending.clear()
        if finished:
            self._journal.path.unlink(missing_ok=True)  # another process may have seen the manifest already
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_part(self) -> None:
        names = (self.folder / f"part-{number:05d}.safetensors" for number in itertools.count())
        path = next(name for name in names if name not in self.parts)
        temporary = path.with_name(f".{path.name}.tmp")
        sample_ids = tuple(sample.sample_id for sample in self._pending)
        tokens = sum(sample.tokens for sample in self._pending)
        trained = sum(sample.trained_tokens for sample in self._pending)
        try:
            with temporary.open("wb") as file:
                hashed = _Hashed(file)
                hashed.write(encode_header(self.layout, sample_ids, tokens, trained))
                for name in tensors_of(self.layout, len(sample_ids), tokens, trained):
                    _write_rows(hashed, name, self._pending)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_folder(self.folder)
        record: dict[str, Any] = {
            "part": path.name,
            "bytes": size,
            "sha256": hashed.sha256,
            "samples": len(sample_ids),
            "tokens": tokens,
            "note": self._note(),
        }
        self._journal.append([record])
        self._list(path, hashed.sha256, sample_ids, tokens)
        self._pending = []
        self._pending_bytes = bytes_of_empty_part(self.layout)


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


def _as_stored(
    layout: ShardLayout, states: torch.Tensor, token_ids: torch.Tensor, loss_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The tensors of one sample as they stand in a part, none of them the caller's."""
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


def _write_rows(file: _Hashed, name: str, samples: list[_Pending]) -> None:
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
