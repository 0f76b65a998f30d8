"""What the disk and the recipe's budget leave for hidden states that are still to be written."""

import shutil
from dataclasses import dataclass

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples.checkpoint_bytes import checkpoint_bytes
from eagle3_pipeline.samples.folder_bytes import bytes_below


@dataclass(frozen=True)
class StateRoom:
    """Bytes that may still be written, and in words what sets this limit."""

    bytes: int
    why: str


def state_room(lineage: Lineage) -> StateRoom:
    """The tighter one of disk and budget; raises MissingInput without a target.

    Of the disk stays free what `storage.keep_free_gib` says, or what checkpoints of the draft will take where
    that is more. Of the budget, what the recipe's folder holds is used, and checkpoints will be.
    """
    storage, checkpoints = lineage.recipe.storage, checkpoint_bytes(lineage)
    folder = next(one for one in (lineage.folder, *lineage.folder.parents) if one.exists())
    free = shutil.disk_usage(folder).free
    kept = int(storage.keep_free_gib * 2**30)
    reserve = f", of which storage.keep_free_gib keeps {storage.keep_free_gib:g} GiB" if kept else ""
    if checkpoints > kept:
        reserve = f", of which about {gib(checkpoints)} are for checkpoints of the draft"
    disk = StateRoom(
        free - max(kept, checkpoints), f"{gib(free)} are free on the disk of {lineage.folder}{reserve}"
    )
    if storage.max_gib is None:
        return disk
    used = bytes_below(lineage.folder)
    left = int(storage.max_gib * 2**30) - used - checkpoints
    why = (
        f"storage.max_gib = {storage.max_gib:g} leaves {gib(left)} ({gib(used)} are used, about "
        f"{gib(checkpoints)} are for checkpoints of the draft)"
    )
    return min(disk, StateRoom(left, why), key=lambda room: room.bytes)


def gib(count: int) -> str:
    """Bytes as a person reads them, in GiB."""
    value = count / 2**30
    return f"{value:.2f} GiB" if abs(value) < 10 else f"{value:,.0f} GiB"
