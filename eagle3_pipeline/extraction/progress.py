"""How far the extraction is and how fast: a line every few seconds, in the log and for `eagle3 status`."""

import logging
import time
from collections.abc import Callable

from eagle3_pipeline.duration import in_words
from eagle3_pipeline.progress_file import ProgressFile

_logger = logging.getLogger(__name__)


class Progress:
    """Counts samples as they are dealt with; `total` is the number of samples of all shards of this run."""

    def __init__(
        self,
        total: int,
        file: ProgressFile | None = None,
        *,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._file = file
        self._every_s = every_s
        self._clock = clock
        self._started = self._said = clock()
        self._done = 0
        self._standing = 0  # skipped, or in a part that an earlier run wrote
        self._tokens = 0
        self._bytes = 0
        self._left_out = 0

    def stand(self, samples: int) -> None:
        """Samples that cost no time: skipped, or kept from an earlier run."""
        self._standing += samples

    def captured(self, tokens: int, size: int) -> None:
        """One sample of `tokens` tokens whose states have `size` bytes."""
        self._tokens += tokens
        self._bytes += size
        self._count()

    def quarantined(self) -> None:
        """One sample whose states must not be used."""
        self._left_out += 1
        self._count()

    def _count(self) -> None:
        self._done += 1
        if self._clock() - self._said >= self._every_s or self._done + self._standing == self._total:
            self._said = self._clock()
            _logger.info(self.line())
            if self._file is not None:
                self._file.write({"line": self.line()})

    def line(self) -> str:
        """The progress line; the time left assumes that the remaining samples are like those so far."""
        seconds = max(self._clock() - self._started, 1e-9)
        reached = self._done + self._standing
        left = (self._total - reached) * seconds / self._done if self._done else 0.0
        left_out = f", {self._left_out} quarantined" if self._left_out else ""
        return (
            f"extraction: {reached:,}/{self._total:,} samples, {self._tokens / seconds:,.0f} tokens/s, "
            f"{self._bytes / 2**20:,.0f} MiB of states{left_out}, about {in_words(left)} left"
        )
