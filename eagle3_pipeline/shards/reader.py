"""Reading hidden-state shards: several folders as one list of samples, any sample at random.

Only headers and offsets are read when a reader is opened. Each part is mapped into memory when its first
sample is asked for; rows are read from the disk when they are used. A reader can be sent to worker
processes: each makes its own maps.
"""

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.shards.format import WAY_OUT, PartHeader, ShardLayout, read_header, read_offsets
from eagle3_pipeline.shards.listing import parts_of_shard
from eagle3_pipeline.shards.precision import restore


@dataclass(frozen=True)
class _Part:
    """Where the samples of one part lie."""

    path: Path
    header: PartHeader
    offsets: "array[int]"
    last_offsets: "array[int] | None"
    """Rows of last_states, where the last layer is kept apart."""


class ShardReader:
    """The samples of one or several complete shard folders, in their order."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Check manifests, sizes, headers and offsets of all parts.

        Raises MissingInput for a folder without manifest or one that was consumed, DamagedFile for a part
        that is cut, missing or not of the same model, layers and precision as the others.
        """
        self._parts: list[_Part] = []
        self._first: list[int] = []  # index of the first sample of each part
        self._maps: dict[int, dict[str, torch.Tensor]] = {}
        self._layout: ShardLayout | None = None
        self.sample_ids: list[str] = []
        for folder in folders:
            for path in parts_of_shard(folder):
                self._open_part(path, read_header(path))

    def _open_part(self, path: Path, header: PartHeader) -> None:
        if self._layout is not None and header.layout != self._layout:
            raise DamagedFile(
                f"{path} holds {header.layout}, the part before it {self._layout}. Shards of one "
                "training must be of one target and the same layers; was a folder moved or copied by hand?"
            )
        self._layout = header.layout
        apart = header.layout.kept == "trained"
        last = read_offsets(path, header, "last_offsets") if apart else None
        self._parts.append(_Part(path, header, read_offsets(path, header), last))
        self._first.append(len(self.sample_ids))
        self.sample_ids.extend(header.sample_ids)

    @property
    def layout(self) -> ShardLayout:
        """Layers, hidden size and model of all samples; raises MissingInput if there are no samples."""
        if self._layout is None:
            raise MissingInput("these hidden-state shards have no samples: were all of them left out?")
        return self._layout

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [end - start for part in self._parts for start, end in pairwise(part.offsets)]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Sample `index`; raises DamagedFile.

        hidden_states [tokens, layers, hidden] bf16, token_ids [tokens] int64, loss_mask [tokens] bool. Rows
        of the last layer that were not kept are zero. What stands in the file just so is a view of the map:
        clone what you want to change.
        """
        number, at = self._find(index)
        part, tensors = self._parts[number], self._map(number)
        start, end = part.offsets[at], part.offsets[at + 1]
        mask = tensors["loss_mask"][start:end]
        states = tensors["hidden_states"][start:end]
        if "scales" in tensors:
            states = restore(states, tensors["scales"][start:end])
        if part.last_offsets is not None:
            last = self._last_rows(number, part.last_offsets[at], part.last_offsets[at + 1])
            states = _with_last(part.path, states, last, mask)
        return {"hidden_states": states, "token_ids": tensors["token_ids"][start:end], "loss_mask": mask}

    def loss_mask(self, index: int) -> torch.Tensor:
        """The mask of sample `index`, [tokens] bool, without touching its states."""
        number, at = self._find(index)
        offsets = self._parts[number].offsets
        return self._map(number)["loss_mask"][offsets[at] : offsets[at + 1]]

    def prefetch(self, indices: Iterable[int]) -> None:
        """Have the kernel fetch the states of samples that are wanted soon; returns at once.

        Without it each sample is waited for alone: a disk reads faster what it may read side by side.
        """
        for index in indices:
            number, at = self._find(index)
            part = self._parts[number]
            offsets = {"hidden_states": part.offsets, "last_states": part.last_offsets}
            with part.path.open("rb") as file:
                for name, rows in offsets.items():
                    if rows is not None and rows[-1]:
                        begin, end = part.header.tensors[name]
                        row = (end - begin) // rows[-1]
                        length = (rows[at + 1] - rows[at]) * row
                        os.posix_fadvise(
                            file.fileno(), begin + rows[at] * row, length, os.POSIX_FADV_WILLNEED
                        )

    def _find(self, index: int) -> tuple[int, int]:
        """Number of the part, and of the sample within it."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        number = bisect_right(self._first, index) - 1
        return number, index - self._first[number]

    def _last_rows(self, number: int, start: int, end: int) -> torch.Tensor:
        tensors = self._map(number)
        rows = tensors["last_states"][start:end]
        return restore(rows, tensors["last_scales"][start:end]) if "last_scales" in tensors else rows

    def _map(self, number: int) -> dict[str, torch.Tensor]:
        """All tensors of a part, as views of one memory map."""
        if number not in self._maps:
            part = self._parts[number]
            try:
                with safe_open(part.path, framework="pt") as file:
                    self._maps[number] = {name: file.get_tensor(name) for name in part.header.tensors}
            except (OSError, SafetensorError) as error:
                raise DamagedFile(f"{part.path} cannot be mapped: {error}. {WAY_OUT}") from error
        return self._maps[number]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_maps": {}}


def _with_last(path: Path, states: torch.Tensor, last: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The states of all layers: `states` of all but the last, and the rows `last` where the mask is true."""
    tokens, layers, hidden = states.shape
    rows = mask.nonzero().flatten()
    if len(rows) != len(last):
        raise DamagedFile(f"{path}: {len(last)} rows of the last layer for {len(rows)} tokens. {WAY_OUT}")
    whole = states.new_empty(tokens, layers + 1, hidden)
    whole[:, :-1] = states
    whole[:, -1] = 0
    whole[rows, -1] = last
    return whole
