"""Reading hidden-state shards: several folders as one list of samples, any sample at random.

Only headers and offsets are read when a reader is opened; the rows of a sample are copied out of a
memory map when they are asked for. A reader can be sent to worker processes: each opens its own maps.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.shards.format import PartHeader, ShardLayout, read_header
from eagle3_pipeline.shards.listing import parts_of_shard


class ShardReader:
    """The samples of one or several complete shard folders, in their order."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Check manifests, sizes and headers of all parts.

        Raises MissingInput for a folder without manifest, DamagedFile for a part that is cut,
        missing or not of the same model and layers as the others.
        """
        self._paths: list[Path] = []
        self._offsets: list[list[int]] = []
        self._first: list[int] = []  # index of the first sample of each part
        self._maps: dict[int, Any] = {}
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
        self._first.append(len(self.sample_ids))
        self._paths.append(path)
        offsets = self._map(len(self._paths) - 1).get_tensor("offsets").tolist()
        if offsets[0] != 0 or offsets[-1] != header.tokens or offsets != sorted(offsets):
            raise DamagedFile(f"{path}: offsets do not rise from 0 to {header.tokens}. Make the shard again.")
        self._offsets.append(offsets)
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
        return [end - start for part in self._offsets for start, end in pairwise(part)]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Sample `index`, copied out of the map.

        hidden_states [tokens, layers, hidden] bf16, token_ids [tokens] int64, loss_mask [tokens] bool.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        part = bisect_right(self._first, index) - 1
        start, end = self._offsets[part][index - self._first[part] :][:2]
        file = self._map(part)
        return {name: file.get_slice(name)[start:end] for name in ("hidden_states", "token_ids", "loss_mask")}

    def _map(self, part: int) -> Any:
        if part not in self._maps:
            try:
                self._maps[part] = safe_open(self._paths[part], framework="pt")
            except (OSError, SafetensorError) as error:
                raise DamagedFile(
                    f"{self._paths[part]} cannot be mapped: {error}. Make its shard again."
                ) from error
        return self._maps[part]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}
