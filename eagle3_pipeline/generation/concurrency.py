"""How many requests are at the server: fixed, or found by the server's own throughput (see climb.py)."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from anyio import CapacityLimiter

from eagle3_pipeline.errors import ServerStalled
from eagle3_pipeline.generation.climb import START, Climb
from eagle3_pipeline.recipe.generation import Generation
from eagle3_pipeline.serving.metrics import ServerMetrics

_logger = logging.getLogger(__name__)

# A reading costs the server 10 ms of a core, which on a CPU its workers wait for: only a search wants many.
_EVERY_S, _EVERY_S_AT_REST, _EVERY_S_IN_SEARCH = 10.0, 2.0, 1.0
_MOST_READINGS = 4096
_ROWS = 100


@dataclass(frozen=True)
class Reading:
    """The server at one moment, as its metrics show it; rates are those since the reading before."""

    at: float
    """The monotonic clock, in seconds."""
    limit: int
    """Slots: requests that may be at the server."""
    running: int
    waiting: int
    tokens_per_second: float
    kv_cache_usage: float
    preemptions: int
    """Times since the reading before that a request lost its KV cache to others."""


def make_slots(settings: Generation) -> CapacityLimiter:
    """The slots that a job begins with."""
    return CapacityLimiter(START if settings.concurrency == "auto" else settings.concurrency)


class Regulator(AbstractAsyncContextManager["Regulator"]):
    """Reads the server's metrics while a job runs and, with `auto`, sets the number of slots, up to `most`.

    `readings` grows while it runs; when there are thousands, every other one is dropped.
    While a server gives no metrics the slots stay as they are. Any other error is logged at once and raised
    at the end, unless the job itself failed. `readings` of earlier servers may be given to go on with.
    """

    def __init__(
        self,
        slots: CapacityLimiter,
        scrape: Callable[[], ServerMetrics],
        on_reading: Callable[[Reading], None],
        *,
        auto: bool,
        most: int,
        readings: list[Reading] | None = None,
    ) -> None:
        self.readings: list[Reading] = [] if readings is None else readings
        self._slots = slots
        self._scrape = scrape
        self._on_reading = on_reading
        self._climb = Climb(most) if auto else None
        self._before: tuple[float, ServerMetrics] | None = None
        self._is_deaf = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        if value is None and not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        try:
            await self._watch()
        except Exception:
            _logger.exception(
                "The number of requests in flight stays as it is from now on, for a bug of ours:"
            )
            raise

    async def _watch(self) -> None:
        while True:
            if (reading := await self._read()) is not None:
                self._keep(reading)
                self._on_reading(reading)
                if self._climb is not None:
                    self._slots.total_tokens = self._climb.look(reading, self._slots.borrowed_tokens)
            await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        if self._climb is None:
            return _EVERY_S
        return _EVERY_S_AT_REST if self._climb.rests else _EVERY_S_IN_SEARCH

    async def _read(self) -> Reading | None:
        """What has happened since the last call; None the first time, and when the server does not answer."""
        try:
            metrics = await asyncio.to_thread(self._scrape)
        except ServerStalled as silence:
            if not self._is_deaf:
                _logger.warning(f"{silence} The number of requests in flight stays as it is meanwhile.")
            self._is_deaf = True
            return None
        self._is_deaf = False
        now = time.monotonic()
        before, self._before = self._before, (now, metrics)
        if before is None:
            return None
        during = metrics - before[1]
        return Reading(
            at=now,
            limit=int(self._slots.total_tokens),
            running=metrics.running,
            waiting=metrics.waiting,
            tokens_per_second=during.generation_tokens / max(now - before[0], 1e-6),
            kv_cache_usage=metrics.kv_cache_usage,
            preemptions=during.preemptions,
        )

    def _keep(self, reading: Reading) -> None:
        self.readings.append(reading)
        if len(self.readings) >= _MOST_READINGS:
            del self.readings[1:-1:2]


def history(readings: Sequence[Reading], since: float) -> dict[str, list[float]]:
    """The readings from `since` on as columns for a plot, at most a hundred rows; {} without any.

    `seconds` count from `since`. A row is the mean of its share of the readings, which is why `limit`,
    `running` and `waiting` need not be whole; the last row is the last reading as it was.
    """
    kept = [reading for reading in tuple(readings) if reading.at >= since]
    if not kept:
        return {}
    rows = min(len(kept), _ROWS)
    borders = [number * (len(kept) - 1) // max(rows - 1, 1) for number in range(rows)] + [len(kept)]
    groups = [kept[start:end] for start, end in itertools.pairwise(borders)]

    def column(digits: int, value: Callable[[Reading], float]) -> list[float]:
        return [round(sum(map(value, group)) / len(group), digits) for group in groups]

    return {
        "seconds": column(1, lambda reading: reading.at - since),
        "limit": column(1, lambda reading: reading.limit),
        "running": column(1, lambda reading: reading.running),
        "waiting": column(1, lambda reading: reading.waiting),
        "tokens_per_second": column(1, lambda reading: reading.tokens_per_second),
        "kv_cache_usage": column(4, lambda reading: reading.kv_cache_usage),
    }
