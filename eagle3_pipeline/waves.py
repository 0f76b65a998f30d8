"""Waves: a set that does not fit the disk at once is extracted, trained on and deleted part by part.

    turn          0        1        2        3        4        5
    pass, wave    0, 0     0, 1     0, 2     1, 0     1, 1     1, 2      two passes over three waves

One turn is the extraction of one wave and the training on it. Its end is written down in this order:

    draft_checkpoint/<fingerprint>/checkpoints/   the weights are durable
    draft_checkpoint/<fingerprint>/turn-0003.json the turn is done: what it took, by digest
    hidden_state_shards/<fingerprint>/<shard>/    consumed.json, then the parts go

A kill between any two of them is made good by whoever comes next (`settle`). The first turn whose record
is missing is the one to work on. With one wave there is one turn, and nothing is ever deleted.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle3_pipeline.durable_files import write_json
from eagle3_pipeline.errors import DamagedFile, MissingInput, RecipeError
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.shards.consumption import consumption, mark_consumed
from eagle3_pipeline.shards.repair import forget


@dataclass(frozen=True)
class Turn:
    """One wave of one pass; all numbers count from 0."""

    number: int
    pass_: int
    wave: int
    shards: tuple[str, ...]
    of: int
    """Turns in all: passes x waves."""
    waves: int
    """Waves of one pass."""

    @property
    def is_last(self) -> bool:
        """Whether the draft is complete after it."""
        return self.number == self.of - 1

    @property
    def name(self) -> str:
        """For people: `wave 2 of 5`, and the pass where there are several."""
        name = f"wave {self.wave + 1} of {self.waves}"
        passes = self.of // self.waves
        return name if passes == 1 else f"{name}, pass {self.pass_ + 1} of {passes}"


@dataclass(frozen=True)
class TurnRecord:
    """What a finished turn leaves for ever."""

    number: int
    of: int
    name: str
    checkpoint: str
    """Digest of the checkpoint it ended with; of the draft's manifest where it was the last one."""
    consumed: dict[str, str]
    """Digest of the manifest of each shard that it was trained on."""
    facts: dict[str, Any] = field(default_factory=dict)
    made_at: str = ""


def turns(lineage: Lineage) -> list[Turn]:
    """All turns, in order; raises MissingInput where the plan of waves is not made (sample_audit).

    Raises RecipeError where alternatives would be trained in waves, or a training could end early.
    """
    waves, passes = lineage.waves()
    lineage.recipe.training.require_one_wave(len(waves))
    of = len(waves) * passes
    return [
        Turn(number, number // len(waves), number % len(waves), waves[number % len(waves)], of, len(waves))
        for number in range(of)
    ]


def next_turn(lineage: Lineage) -> Turn | None:
    """The turn to work on, None when all are done. Raises MissingInput as `turns`, and without vocabulary."""
    planned = turns(lineage)
    if len(planned) == 1:
        return None if is_trained(lineage) else planned[0]
    folder = lineage.draft_checkpoint().folder
    return next((turn for turn in planned if not record_path(folder, turn.number).exists()), None)


def due(lineage: Lineage, shards: Sequence[str]) -> list[str]:
    """Which of `shards` are to be extracted now, in their order.

    Those of an earlier wave of this pass are done with and are not among them, nor are those of the turn
    that ended last. One of this wave that was consumed before (in an earlier pass, or by the training of
    other settings) is forgotten, so that it can be made again. Raises RecipeError where a shard of a later
    wave has no states: there is no room for it yet.
    """
    planned = turns(lineage)
    if len(planned) == 1:
        return _due_at_once(lineage, shards)
    settle(lineage)
    turn = next_turn(lineage)
    if turn is None or finished_turn(lineage, shards) is not None:
        return []
    before = {shard for one in planned[: turn.number] if one.pass_ == turn.pass_ for shard in one.shards}
    places = {shard: lineage.hidden_state_shards(shard) for shard in shards if shard not in before}
    early = [
        shard
        for shard, place in places.items()
        if shard not in turn.shards and (place.manifest() is None or consumption(place.folder) is not None)
    ]
    if early:
        raise too_early(lineage, turn, early, "cannot be extracted yet")
    for shard in turn.shards:
        if shard in places and consumption(places[shard].folder) is not None:
            forget(places[shard])
    return list(places)


def too_early(lineage: Lineage, turn: Turn, shards: Sequence[str], what: str) -> RecipeError:
    """The error for shards whose wave is not the one to work on, which is `turn`."""
    slug, more = lineage.recipe.slug, len(shards) - 5
    names = f"{', '.join(shards[:5])}{f' and {more} more' if more > 0 else ''}"
    return RecipeError(
        f"{names} {what}: {turn.name} comes first, there is no room for more at once. "
        "Materialise hidden_state_shards and draft_checkpoint for the partitions "
        f"{slug}-{turn.shards[0]} to {slug}-{turn.shards[-1]}, or let `eagle3 run` go through the waves."
    )


def finished_turn(lineage: Lineage, shards: Sequence[str]) -> TurnRecord | None:
    """The turn of the pass at work that was trained on all of `shards`, None where there is none.

    Between two passes the newest turn counts as well: its run may be repeated because a kill came after
    the record and before anybody else heard of it.
    """
    planned = turns(lineage)
    done = records(lineage.draft_checkpoint().folder) if len(planned) > 1 else []
    if not done or not shards:
        return None
    at_work = planned[min(len(done), len(planned) - 1)].pass_
    of_pass = [record for record in done if planned[record.number].pass_ == at_work] or done[-1:]
    return next((record for record in of_pass if set(shards) <= set(record.consumed)), None)


def _due_at_once(lineage: Lineage, shards: Sequence[str]) -> list[str]:
    """All shards in one turn; those that a training in waves consumed are wanted again, until one is made."""
    places = {shard: lineage.hidden_state_shards(shard) for shard in shards}
    gone = {shard for shard, place in places.items() if consumption(place.folder) is not None}
    if gone and is_trained(lineage):
        return [shard for shard in shards if shard not in gone]
    for shard in gone:
        forget(places[shard])
    return list(shards)


def settle(lineage: Lineage) -> None:
    """Finish the deletion that the newest record speaks of: a kill may have come before it or amid it.

    The newest is enough: nothing of a later turn starts before this is done, and its shards cannot be
    in use again, since the next turn is of another wave.
    """
    folder = lineage.draft_checkpoint().folder
    if not (done := records(folder)):
        return
    record = done[-1]
    for shard, digest in record.consumed.items():
        place = lineage.hidden_state_shards(shard)
        if (manifest := place.manifest()) is not None and manifest.digest == digest:
            mark_consumed(place.folder, record.checkpoint, record.number)


def finish_turn(
    lineage: Lineage, turn: Turn, checkpoint: str, consumed: dict[str, str], facts: dict[str, Any]
) -> TurnRecord:
    """Write the record of a turn whose checkpoint is durable, then delete what it consumed."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    record = TurnRecord(turn.number, turn.of, turn.name, checkpoint, consumed, facts, at)
    write_json(record_path(lineage.draft_checkpoint().folder, turn.number), asdict(record))
    settle(lineage)
    return record


def records(folder: Path) -> list[TurnRecord]:
    """The records of the finished turns in the folder of a draft_checkpoint, in order; raises DamagedFile."""
    return [read_record(path) for path in sorted(folder.glob("turn-*.json"))]


def record_path(folder: Path, number: int) -> Path:
    """Where the record of a turn lies in the folder of its draft_checkpoint."""
    return folder / f"turn-{number:04d}.json"


def read_record(path: Path) -> TurnRecord:
    """Read one record; raises DamagedFile."""
    try:
        return TurnRecord(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise DamagedFile(
            f"{path} is no record of a turn ({error}). Move {path.parent} away: all waves are then extracted "
            "and trained on again."
        ) from error


def is_trained(lineage: Lineage) -> bool:
    """Whether the draft stands."""
    try:
        return lineage.draft_checkpoint().manifest() is not None
    except MissingInput:  # the states or the vocabulary are not there yet
        return False
