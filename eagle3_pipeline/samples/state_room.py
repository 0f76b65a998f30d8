"""What the disk and the recipe's budget leave for hidden states that are still to be written."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from eagle3_pipeline.lineage import Lineage


@dataclass(frozen=True)
class StateRoom:
    """Bytes that may still be written, and in words what sets this limit."""

    bytes: int
    why: str


def state_room(lineage: Lineage) -> StateRoom:
    """The tighter one of disk and budget.

    Of the disk, `storage.keep_free_gib` stay free; of the budget, what the recipe's folder holds is used.
    """
    storage = lineage.recipe.storage
    folder = next(one for one in (lineage.folder, *lineage.folder.parents) if one.exists())
    free = shutil.disk_usage(folder).free
    kept = int(storage.keep_free_gib * 2**30)
    reserve = f", of which storage.keep_free_gib keeps {storage.keep_free_gib:g} GiB" if kept else ""
    disk = StateRoom(free - kept, f"{gib(free)} are free on the disk of {lineage.folder}{reserve}")
    if storage.max_gib is None:
        return disk
    used = bytes_below(lineage.folder)
    left = int(storage.max_gib * 2**30) - used
    why = f"storage.max_gib = {storage.max_gib:g} leaves {gib(left)} ({gib(used)} are used)"
    return min(disk, StateRoom(left, why), key=lambda room: room.bytes)


def gib(count: int) -> str:
    """Bytes as a person reads them, in GiB."""
    value = count / 2**30
    return f"{value:.2f} GiB" if abs(value) < 10 else f"{value:,.0f} GiB"


def bytes_below(folder: Path) -> int:
    """Bytes of all files below a folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_size
            except FileNotFoundError:
                continue  # another process moved it meanwhile
    return total
