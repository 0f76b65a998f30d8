"""Watches the disk and the budget while states are written, so that the work ends before they are full."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from eagle3_pipeline.errors import NotEnoughRoom

_EVERY_S = 1.0


class SpaceWatch:
    """The disk of `folder`, of which `keep_free` bytes stay free, and `budget` bytes that may be written."""

    def __init__(
        self,
        folder: Path,
        keep_free: int,
        budget: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._keep_free = keep_free
        self._budget = budget
        self._clock = clock
        self._looked = -_EVERY_S
        self._taken = 0

    def take(self, count: int, pending: int = 0) -> None:
        """`count` more bytes are to be written, with the `pending` ones of their part that lie in memory.

        Raises NotEnoughRoom. The disk is looked at once a second.
        """
        self._taken += count
        if self._budget is not None and self._taken > self._budget:
            raise NotEnoughRoom(
                f"storage.max_gib is reached: {_gib(self._taken)} of states are made, "
                f"{_gib(self._budget)} were left at the start. Raise it, or delete what is not needed; "
                f"{_AND_THEN}"
            )
        if self._clock() - self._looked < _EVERY_S:
            return
        self._looked = self._clock()
        free = shutil.disk_usage(self._folder).free
        if free - pending - count < self._keep_free:
            raise NotEnoughRoom(
                f"{_gib(free)} are free on the disk of {self._folder}, of which the part in memory takes "
                f"{_gib(pending + count)}, and storage.keep_free_gib wants {_gib(self._keep_free)} left for "
                f"everything else. Free some space; {_AND_THEN}"
            )


_AND_THEN = "then materialise hidden_state_shards again: finished shards and parts are kept."


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
