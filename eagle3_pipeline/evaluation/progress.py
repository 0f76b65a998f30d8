"""How far the report is: a line for the log at each step, and for `eagle3 status` meanwhile."""

import logging
import time
from collections.abc import Callable

from eagle3_pipeline.duration import in_words

logger = logging.getLogger(__name__)


class Progress:
    """Counts measurements (one set, once) of a report that has `total` of them."""

    def __init__(self, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._started = clock()
        self._kept = self._done = 0
        self._now = ""

    def stand(self, measurements: int) -> None:
        """So many are there from an earlier attempt."""
        self._kept += measurements

    def add(self) -> None:
        """One more was measured."""
        self._done += 1

    def say(self, what: str) -> None:
        """`what` comes now."""
        self._now = what
        logger.info(self.line())

    def line(self) -> str:
        """One line for people; the time left assumes that the rest is like what was measured so far."""
        reached = self._done + self._kept
        earlier = f" ({self._kept} from before)" if self._kept else ""
        parts = [f"{reached}/{self._total} measurements{earlier}"]
        if self._now:
            parts.append(self._now)
        if self._done and reached < self._total:
            each = (self._clock() - self._started) / self._done
            parts.append(f"about {in_words((self._total - reached) * each)} left")
        return ", ".join(parts)
