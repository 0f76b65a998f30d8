"""Which Dagster run comes next where a recipe is trained in waves.

One run cannot do it all: the states of a wave are written when those of the one before are deleted.

    <slug>_samples      target_model .. sample_audit, vocabulary_map: what the plan of waves needs
    <slug>_wave         hidden_state_shards of one wave, draft_checkpoint      once per turn (waves.py)
    <slug>_release      acceptance_report, released_draft

What lies on the disk decides, so whoever asks (`eagle3 run`, the sensor) goes on where anybody stopped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.waves import next_turn

WAVE_RUN_TAG = "eagle3/wave_run"
"""Tag of a run with its key: by it the sensor finds what became of it."""


@dataclass(frozen=True)
class WaveRun:
    """One run: its job, and the shards that it takes."""

    job: str
    partitions: tuple[str, str]
    """Keys of the first and the last Dagster partition."""
    key: str
    """The same for the same work, another for any other."""
    what: str
    """For people."""

    @property
    def tags(self) -> dict[str, str]:
        """Tags that Dagster needs for a range of partitions, and the key."""
        return {
            "dagster/asset_partition_range_start": self.partitions[0],
            "dagster/asset_partition_range_end": self.partitions[1],
            WAVE_RUN_TAG: self.key,
        }


def next_run(lineage: Lineage) -> WaveRun | None:
    """The run that is to be started now; None where the draft is released."""
    shards = lineage.recipe.shards
    if lineage.released() is not None:
        return None
    planned = [_made(place) for place in (lineage.sample_audit, lineage.vocabulary_map)]
    if None in planned or (lineage.recipe.base_draft and _made(lineage.base_draft) is None):
        return _run(lineage, "samples", shards, [], "the samples, and the plan of waves")
    turn = next_turn(lineage)
    if turn is None:
        report = lineage.acceptance_report().fingerprint
        return _run(lineage, "release", shards, [report], "the measurement and the release")
    plan = lineage.sample_audit().require().digest
    return _run(lineage, "wave", turn.shards, [plan, turn.number], f"{turn.name}, {_range(turn.shards)}")


def _run(lineage: Lineage, stage: str, shards: Sequence[str], work: list[Any], what: str) -> WaveRun:
    slug = lineage.recipe.slug
    # With other settings it is other work: what failed before may be started again.
    key = fingerprint([lineage.recipe.model_dump(mode="json"), *work])
    partitions = (f"{slug}-{shards[0]}", f"{slug}-{shards[-1]}")
    return WaveRun(f"{slug}_{stage}", partitions, f"{stage}-{key[:12]}", what)


def _range(shards: Sequence[str]) -> str:
    return shards[0] if len(shards) == 1 else f"{shards[0]} to {shards[-1]}"


def _made(place: Callable[[], Place]) -> Manifest | None:
    try:
        return place().manifest()
    except MissingInput:  # something before it is not made either
        return None
