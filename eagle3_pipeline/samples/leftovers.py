"""States and checkpoints that no place of a recipe names any more: other settings made them.

Nothing deletes them by itself, for the settings may come back. Where room is missing they are named.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3_pipeline.alternatives import alternatives
from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples.checkpoint_bytes import CHECKPOINTS_FOLDER
from eagle3_pipeline.samples.decided_waves import decided_waves
from eagle3_pipeline.samples.folder_bytes import bytes_below
from eagle3_pipeline.samples.state_room import gib

_OF_A_TRAINING = (CHECKPOINTS_FOLDER, "validation")
_LISTED = 5
# Below it a folder holds manifests and no states.
_WORTH_BYTES = 2**20


@dataclass(frozen=True)
class Leftover:
    """A folder that may be deleted."""

    folder: Path
    bytes: int


def leftovers(lineage: Lineage) -> list[Leftover]:
    """All of them that are worth it, the largest first."""
    found = (Leftover(folder, bytes_below(folder)) for folder in _unnamed(lineage))
    return sorted(
        (one for one in found if one.bytes >= _WORTH_BYTES), key=lambda one: one.bytes, reverse=True
    )


def what_to_delete(found: Sequence[Leftover]) -> str:
    """What to delete, for a person; only the largest by name."""
    named = ", ".join(f"{one.folder} ({gib(one.bytes)})" for one in found[:_LISTED])
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return f"no longer used: delete {named}{more} to free {gib(sum(one.bytes for one in found))}"


def _unnamed(lineage: Lineage) -> Iterator[Path]:
    states = _places(lineage, "hidden_state_shards")
    yield from _others(lineage.folder / "hidden_state_shards", states)
    captured = _places(lineage, "captured") if lineage.recipe.extraction.while_generating else set()
    yield from _others(lineage.folder / "captured", captured)
    try:
        drafts = set(_drafts(lineage))
    except MissingInput:  # what a draft is made of is not all there, so its name is not known
        return
    for folder in (lineage.folder / "draft_checkpoint").glob("*"):
        if folder not in drafts:
            yield from (folder / name for name in _OF_A_TRAINING)


def _others(parent: Path, named: set[Path]) -> Iterable[Path]:
    return (folder for folder in parent.glob("*/*") if folder not in named)


def _places(lineage: Lineage, kind: str) -> set[Path]:
    """The folders of all shards whose samples, or prompts, are there."""
    folders = set()
    for shard in lineage.recipe.prompts.shards:
        try:
            states = kind == "hidden_state_shards"
            folders.add(lineage.hidden_state_shards(shard).folder if states else lineage.captured(shard))
        except MissingInput:
            continue
    return folders


def _drafts(lineage: Lineage) -> Iterator[Path]:
    if lineage.recipe.extraction.waves == 1 or lineage.recipe.training.sweep:
        yield lineage.draft_checkpoint().folder
        yield from (one.draft_checkpoint().folder for one in alternatives(lineage).values())
    else:
        yield from (lineage.draft_checkpoint(waves).folder for waves in decided_waves(lineage))
