"""The samples that one turn reads, under their numbers in the whole training.

    hidden_state_shards/.../<shards of the wave>      what it trains on
    draft_checkpoint/<fingerprint>/validation/        what judges the draft in every turn

The validation samples are in the first wave. Their states are copied into a shard of their own before the
first turn trains, since the wave is deleted after it, and they are read from the copy ever after.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from eagle3_pipeline.durable_files import require_free_bytes
from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.manifest import Place
from eagle3_pipeline.shards.format import WAY_OUT
from eagle3_pipeline.shards.listing import JOURNAL_NAME, parts_of_shard
from eagle3_pipeline.shards.reader import ShardReader
from eagle3_pipeline.shards.writer import ShardWriter
from eagle3_pipeline.training.batches import require_prompt
from eagle3_pipeline.training.plan import FULL_DISK, TrainingPlan
from eagle3_pipeline.training.source import ShardSource
from eagle3_pipeline.training.wave_samples import VALIDATION_FOLDER, WaveSamples

_PART_BYTES = 1 << 30


class WaveSource:
    """A SampleSource that lacks the samples of other waves, and those whose states were unusable."""

    def __init__(
        self, samples: WaveSamples, judges: Sequence[int], wave: ShardSource, copy: ShardSource
    ) -> None:
        """Find each planned sample, those of `judges` in the copy only: so every turn has the same ones.

        A later pass makes the states of the first wave again, and may find those of a judge usable that
        were not before. Raises DamagedFile where a sample has another length than planned, or a mask
        that supervises its prompt.
        """
        numbers = {name: number for number, name in enumerate(samples.names)}
        validation = set(judges)
        self._at: dict[int, tuple[ShardSource, int]] = {}
        for source in (wave, copy):
            for index in range(len(source)):
                number = numbers.get(source.name(index))
                if number is not None and (number in validation) == (source is copy):
                    self._at[number] = (source, index)
        for number, (source, index) in self._at.items():
            mask = source.loss_mask(index)
            require_prompt(samples.names[number], mask)
            rows = len(mask) - 1
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
        source, index = self._at[number]
        return source.loss_mask(index)

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Have the states of these samples fetched from the disk, to be read soon."""
        for source, index in map(self._at.__getitem__, numbers):
            source.prefetch([index])

    def read(self, number: int) -> Mapping[str, torch.Tensor]:
        """hidden_states `[tokens, layers, hidden]`, token_ids and loss_mask `[tokens]` of one sample."""
        source, index = self._at[number]
        return source.read(index)

    def name(self, number: int) -> str:
        """The sample's id."""
        source, index = self._at[number]
        return source.name(index)


def keep_validation(plan: TrainingPlan, names: Sequence[str]) -> Path:
    """Copy the states of the validation samples `names` out of the plan's shards, unless they are kept.

    Returns the folder of the copy. Killed, it goes on with the samples that are missing. Raises
    MissingInput where there is nothing to copy, DamagedFile where the copy is damaged or a later turn finds
    none, and NotEnoughRoom before anything is written.
    """
    folder = Path(plan.folder)
    place = Place(folder / VALIDATION_FOLDER, "hidden_state_shards", plan.fingerprint, {})
    anew = f"Move {folder} away: all waves are then extracted and trained on again."
    if place.manifest() is not None:
        try:
            parts_of_shard(place.folder)
        except DamagedFile as error:
            flaw = str(error).removesuffix(WAY_OUT).rstrip()
            again = f"Delete {place.folder} and start again: they are copied again from the first wave."
            raise DamagedFile(f"validation samples: {flaw} {anew if plan.turn else again}") from error
        (place.folder / JOURNAL_NAME).unlink(missing_ok=True)  # a kill came between the manifest and this
        return place.folder
    if plan.turn:
        raise DamagedFile(
            f"no validation samples in {place.folder}: the first wave's turn left them there, and its states "
            f"are deleted. {anew}"
        )
    _copy(ShardReader([Path(one) for one in plan.shards]), names, place, plan.keep_free_bytes)
    return place.folder


def _copy(reader: ShardReader, names: Sequence[str], place: Place, keep_free: int) -> None:
    at = {name: index for index, name in enumerate(reader.sample_ids)}
    found = [name for name in names if name in at]
    if not found:
        raise MissingInput(
            f"none of the {len(names)} validation samples has usable states. Look at what is quarantined in "
            "hidden_state_shards of the first wave."
        )
    place.folder.mkdir(parents=True, exist_ok=True)
    with ShardWriter(place.folder, reader.layout, _PART_BYTES, place.fingerprint) as writer:
        missing = [name for name in found if name not in writer.done]
        tokens = sum(reader.lengths[at[name]] for name in missing)
        require_free_bytes(
            place.folder,
            tokens * reader.layout.bytes_per_token + keep_free,
            f"the copy of the states of {len(missing)} validation samples, with storage.keep_free_gib,",
            FULL_DISK,
        )
        for name in missing:
            writer.add(name, **reader[at[name]])
        place.finish(writer.complete(), {"samples": len(found)})
        writer.close(finished=True)
