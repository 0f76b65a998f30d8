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

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from eagle3_pipeline.durable_files import fsync_folder
from eagle3_pipeline.errors import Busy
from eagle3_pipeline.journal import Journal
from eagle3_pipeline.manifest import MANIFEST_NAME
from eagle3_pipeline.shards.format import (
    ShardLayout,
    bytes_of_empty_part,
    bytes_of_sample,
    read_header,
)
from eagle3_pipeline.shards.listing import JOURNAL_NAME, flaw_of
from eagle3_pipeline.shards.part import StoredSample, as_stored, write_part

_logger = logging.getLogger(__name__)


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
        self._pending: list[StoredSample] = []
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
        sample = StoredSample(sample_id, as_stored(self.layout, hidden_states, token_ids, loss_mask))
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
        written = write_part(path, self.layout, self._pending)
        record: dict[str, Any] = {
            "part": path.name,
            "bytes": written.bytes,
            "sha256": written.sha256,
            "samples": len(written.sample_ids),
            "tokens": written.tokens,
            "note": self._note(),
        }
        self._journal.append([record])
        self._list(path, written.sha256, written.sample_ids, written.tokens)
        self._pending = []
        self._pending_bytes = bytes_of_empty_part(self.layout)
