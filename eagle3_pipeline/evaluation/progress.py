"""How far the report is: a line at each step, in the log and for `eagle3 status`."""

import logging
import time
from collections.abc import Callable

from eagle3_pipeline.duration import in_words
from eagle3_pipeline.progress_file import ProgressFile

logger = logging.getLogger(__name__)


class Progress:
    """Counts measurements (one set, once) of a report that has `total` of them."""

    def __init__(
        self, total: int, file: ProgressFile, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total
        self._file = file
        self._clock = clock
        self._started = clock()
        self._kept = self._done = 0

    def stand(self, measurements: int) -> None:
        """So many are there from an earlier attempt."""
        self._kept += measurements

    def add(self) -> None:
        """One more was measured."""
        self._done += 1

    def say(self, what: str) -> None:
        """Tell how far it is, and `what` comes now."""
        line = self.line(what)
        logger.info(line)
        self._file.write({"line": line})

    def line(self, what: str) -> str:
        """One line for people; the time left assumes that the rest is like what was measured so far."""
        reached = self._done + self._kept
        earlier = f" ({self._kept} from before)" if self._kept else ""
        line = f"{reached}/{self._total} measurements{earlier}, now {what}"
        if self._done and reached < self._total:
            each = (self._clock() - self._started) / self._done
            line += f", about {in_words((self._total - reached) * each)} left"
        return line
