"""The samples that one turn reads, under their numbers in the whole training.

    hidden_state_shards/.../<shards of the wave>      what it trains on
    draft_checkpoint/<fingerprint>/validation/        what judges the draft in every turn

The validation samples come from the first wave. Their states are copied into a shard of their own before the
first turn trains, since the wave is deleted after it, and they are read from the copy ever after.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from eagle3_pipeline.durable_files import full_disk_named
from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.manifest import Place
from eagle3_pipeline.shards.listing import JOURNAL_NAME
from eagle3_pipeline.shards.reader import ShardReader
from eagle3_pipeline.shards.writer import ShardWriter
from eagle3_pipeline.training.source import ShardSource
from eagle3_pipeline.training.wave_samples import VALIDATION_FOLDER, WaveSamples

_PART_BYTES = 1 << 30


class WaveSource:
    """A SampleSource that lacks the samples of other waves, and those whose states were unusable."""

    def __init__(self, samples: WaveSamples, source: ShardSource) -> None:
        """Find each planned sample in `source`; raises DamagedFile where one has another length."""
        self._source = source
        # A validation sample of the first wave is there twice; its copy, which comes last, is taken.
        at = {source.name(index): index for index in range(len(source))}
        self._at = {number: at[name] for number, name in enumerate(samples.names) if name in at}
        for number, index in self._at.items():
            rows = len(source.loss_mask(index)) - 1
            if rows != samples.rows[number]:
                raise DamagedFile(
                    f"the states of {samples.names[number]} have {rows + 1} tokens, expected "
                    f"{samples.rows[number] + 1} by its sample. Make its shard again."
                )

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, number: int) -> bool:
        """Whether the states of this sample are there."""
        return number in self._at

    def loss_mask(self, number: int) -> torch.Tensor:
        """The mask of one sample, `[tokens]`."""
        return self._source.loss_mask(self._at[number])

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Have the states of these samples fetched from the disk, to be read soon."""
        self._source.prefetch([self._at[number] for number in numbers])

    def read(self, number: int) -> Mapping[str, torch.Tensor]:
        """hidden_states `[tokens, layers, hidden]`, token_ids and loss_mask `[tokens]` of one sample."""
        return self._source.read(self._at[number])

    def name(self, number: int) -> str:
        """The sample's id."""
        return self._source.name(self._at[number])


def keep_validation(
    folder: Path, fingerprint: str, turn: int, shards: Sequence[Path], names: Sequence[str]
) -> Path:
    """Copy the states of the validation samples `names` out of `shards`, unless they are kept already.

    Returns the folder of the copy. Killed, it goes on with the samples that are missing. Raises
    MissingInput where there is nothing to copy, DamagedFile where a later turn finds no copy, and
    NotEnoughRoom.
    """
    place = Place(folder / VALIDATION_FOLDER, "hidden_state_shards", fingerprint, {})
    if place.manifest() is not None:
        (place.folder / JOURNAL_NAME).unlink(missing_ok=True)  # a kill came between the manifest and this
        return place.folder
    if turn:
        raise DamagedFile(
            f"no validation samples in {place.folder}: the first wave's turn left them there, and its states "
            f"are deleted. Move {folder} away: all waves are then extracted and trained on again."
        )
    reader = ShardReader(shards)
    at = {name: index for index, name in enumerate(reader.sample_ids)}
    found = [name for name in names if name in at]
    if not found:
        raise MissingInput(
            f"none of the {len(names)} validation samples has usable states. Look at what is quarantined in "
            "hidden_state_shards of the first wave."
        )
    way_out = "Free some space or point EAGLE3_STORAGE to a larger disk, then materialise it again."
    place.folder.mkdir(parents=True, exist_ok=True)
    with (
        full_disk_named(folder, way_out),
        ShardWriter(place.folder, reader.layout, _PART_BYTES, fingerprint) as writer,
    ):
        for name in found:
            if name not in writer.done:
                writer.add(name, **reader[at[name]])
        parts = writer.complete()
        place.finish(parts, {"samples": len(found)}, checksums=parts)
        writer.close(finished=True)
    return place.folder
