"""How many requests are at the server: fixed, or found by the server's own throughput."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType

from anyio import CapacityLimiter

from eagle3_pipeline.recipe.settings import Generation
from eagle3_pipeline.serving.metrics import ServerMetrics


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


def make_slots(settings: Generation) -> CapacityLimiter:
    """The slots that a job begins with."""
    return CapacityLimiter(64 if settings.concurrency == "auto" else settings.concurrency)


class Regulator(AbstractAsyncContextManager["Regulator"]):
    """Reads the server's metrics while a job runs and, with `auto`, sets the number of slots."""

    def __init__(
        self,
        slots: CapacityLimiter,
        scrape: Callable[[], ServerMetrics],
        on_reading: Callable[[Reading], None],
        *,
        auto: bool,
        most: int,
    ) -> None:
        self.readings: list[Reading] = []

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def history(readings: Sequence[Reading], since: float) -> dict[str, list[float]]:
    """The readings from `since` on as columns for a plot, thinned to a hundred rows."""
    return {}
