"""The samples of hidden-state shards, as training reads them: masks at once, states on demand."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.shards.reader import ShardReader


class ShardSource:
    """All samples of several shard folders, in order. Nothing of them is kept in memory."""

    def __init__(self, folders: Sequence[Path], layers: tuple[int, ...], model_fingerprint: str) -> None:
        """Open the shards.

        Raises MissingInput, and DamagedFile where they hold other layers, or the states of another model.
        """
        self._reader = ShardReader(folders)
        layout = self._reader.layout
        if tuple(layout.layer_ids) != layers:
            raise DamagedFile(
                f"the shards hold the layers {list(layout.layer_ids)}, expected {list(layers)}: "
                "make the hidden states again"
            )
        if layout.model_fingerprint != model_fingerprint:
            raise DamagedFile(
                f"the shards hold states of the model {layout.model_fingerprint[:12]}, expected those of the "
                f"target, {model_fingerprint[:12]}: was a folder moved or copied by hand? Make them again"
            )

    def __len__(self) -> int:
        return len(self._reader)

    def loss_mask(self, index: int) -> torch.Tensor:
        """The mask of one sample, `[tokens]`."""
        return self._reader.loss_mask(index)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Have the states of these samples fetched from the disk, to be read soon."""
        self._reader.prefetch(indices)

    def read(self, index: int) -> Mapping[str, torch.Tensor]:
        """hidden_states `[tokens, layers, hidden]`, token_ids and loss_mask `[tokens]` of one sample."""
        return self._reader[index]

    def name(self, index: int) -> str:
        """The sample's id."""
        return self._reader.sample_ids[index]
