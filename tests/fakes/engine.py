"""The stand-in's engine: shares its time among the requests that run, and knows how far each one is.

All running requests advance alike, so one number tells the work that each has got since the start of the
server. A request ends when that number has grown by its own work; only the next end needs a timer.
"""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_BEYOND = 1.5  # time per token beyond the knee grows by this power: all together make fewer


@dataclass(eq=False)
class Work:
    """A running request: `tokens` in `seconds` of an engine that has nothing else to do."""

    begin: float
    seconds: float
    tokens: int
    done: "asyncio.Future[None]"

    def tokens_at(self, progress: float) -> int:
        """Tokens so far, at a progress of the engine."""
        share = min(1.0, (progress - self.begin) / self.seconds) if self.seconds > 0 else 1.0
        return math.floor(self.tokens * share)


class Engine:
    """One engine. `knee()` is the number of running requests beyond which it slows down; 0 for none."""

    def __init__(self, knee: Callable[[], int]) -> None:
        self._knee = knee
        self._running: set[Work] = set()
        self._ends: list[tuple[float, int, Work]] = []
        self._number = itertools.count()
        self._progress = 0.0
        self._looked_at = 0.0
        self._slowness = 1.0
        self._timer: asyncio.TimerHandle | None = None
        self._tokens = 0

    @property
    def running(self) -> int:
        """Requests that run now."""
        return len(self._running)

    def tokens(self) -> int:
        """Tokens made since the start, those of unfinished requests included."""
        self._advance()
        return self._tokens + sum(work.tokens_at(self._progress) for work in self._running)

    @contextmanager
    def run(self, seconds: float, tokens: int) -> Iterator["asyncio.Future[None]"]:
        """A request of this much work; the future is done when it is. Leaving earlier aborts it."""
        self._advance()
        work = Work(self._progress, seconds, tokens, asyncio.get_running_loop().create_future())
        self._running.add(work)
        heapq.heappush(self._ends, (self._progress + seconds, next(self._number), work))
        self._plan()
        try:
            yield work.done
        finally:
            if work in self._running:
                self._advance()
                self._end(work, work.tokens_at(self._progress))
                self._plan()

    def _end(self, work: Work, tokens: int) -> None:
        self._running.remove(work)
        self._tokens += tokens
        if not work.done.done():
            work.done.set_result(None)

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        self._progress += (now - self._looked_at) / self._slowness
        self._looked_at = now

    def _plan(self) -> None:
        """Set the timer for the next end, at the speed of as many requests as run now."""
        knee = self._knee()
        self._slowness = max(1.0, len(self._running) / knee) ** _BEYOND if knee else 1.0
        while self._ends and self._ends[0][2] not in self._running:
            heapq.heappop(self._ends)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends and math.isfinite(self._ends[0][0]):
            wait = max(0.0, self._ends[0][0] - self._progress) * self._slowness
            self._timer = asyncio.get_running_loop().call_later(wait, self._finish)

    def _finish(self) -> None:
        self._advance()
        while self._ends and self._ends[0][0] <= self._progress + 1e-9:
            work = heapq.heappop(self._ends)[2]
            if work in self._running:
                self._end(work, work.tokens)
        self._plan()
