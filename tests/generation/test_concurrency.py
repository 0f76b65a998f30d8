import asyncio
import itertools
import logging
import time
from dataclasses import replace

import pytest
from anyio import CapacityLimiter

from eagle3_pipeline.errors import ServerStalled
from eagle3_pipeline.generation import climb, concurrency
from eagle3_pipeline.generation.concurrency import Reading, Regulator, history
from eagle3_pipeline.serving.metrics import ServerMetrics, parse_metrics


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings follow each other at once."""
    for name in ("_EVERY_S", "_EVERY_S_AT_REST", "_EVERY_S_IN_SEARCH"):
        monkeypatch.setattr(concurrency, name, 0.001)
    monkeypatch.setattr(climb, "_LEAST_S", 0.0)


class Server:
    """Metrics of a server that makes a token per request in each look, and fails where it is told to."""

    def __init__(self, slots: CapacityLimiter, silent: range = range(0)) -> None:
        self.looks = 0
        self._slots = slots
        self._silent = silent
        self._tokens = 0

    def scrape(self) -> ServerMetrics:
        self.looks += 1
        if self.looks in self._silent:
            raise ServerStalled("no counters. Is the server alive?")
        self._tokens += 1000 * self._slots.borrowed_tokens
        return replace(
            parse_metrics(""),
            running=self._slots.borrowed_tokens,
            generation_tokens=self._tokens,
            preemptions=7,
        )


async def fill(slots: CapacityLimiter) -> None:
    """Keep all slots in use, however many there are."""
    for number in range(10_000):
        await slots.acquire_on_behalf_of(number)


async def regulate(server: Server, slots: CapacityLimiter, looks: int, *, auto: bool) -> list[Reading]:
    heard: list[Reading] = []
    filling = asyncio.create_task(fill(slots))
    regulator = Regulator(slots, server.scrape, heard.append, auto=auto, most=512)
    async with regulator:
        deadline = time.monotonic() + 10
        while server.looks < looks:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
    filling.cancel()
    assert regulator.readings == heard
    return heard


def test_a_fixed_number_is_never_changed_and_its_readings_are_kept() -> None:
    slots = CapacityLimiter(20)
    readings = asyncio.run(regulate(Server(slots), slots, 30, auto=False))
    assert {reading.limit for reading in readings} == {20}
    assert slots.total_tokens == 20
    assert len(readings) >= 28
    assert {reading.preemptions for reading in readings} == {0}
    assert all(later.at > earlier.at for earlier, later in itertools.pairwise(readings))


def test_auto_raises_the_slots_of_a_server_that_grows_with_them() -> None:
    slots = CapacityLimiter(concurrency.START)
    readings = asyncio.run(regulate(Server(slots), slots, 60, auto=True))
    assert max(reading.running for reading in readings) == max(reading.limit for reading in readings) > 60


@pytest.mark.parametrize("auto", [True, False])
def test_a_server_without_metrics_ends_nothing_and_is_named_once(
    auto: bool, caplog: pytest.LogCaptureFixture
) -> None:
    slots = CapacityLimiter(20)
    with caplog.at_level(logging.WARNING):
        readings = asyncio.run(regulate(Server(slots, silent=range(3, 20)), slots, 30, auto=auto))
    assert [record.message for record in caplog.records] == [
        "no counters. Is the server alive? The number of requests in flight stays as it is meanwhile."
    ]
    assert len(readings) >= 9


def test_what_goes_wrong_in_the_listener_is_raised_at_the_end() -> None:
    slots = CapacityLimiter(2)

    def listen(reading: Reading) -> None:
        raise ValueError("our own mistake")

    async def run() -> None:
        async with Regulator(slots, Server(slots).scrape, listen, auto=False, most=2) as regulator:
            assert regulator._task is not None
            await asyncio.wait([regulator._task], timeout=10)

    with pytest.raises(ValueError, match="our own mistake"):
        asyncio.run(run())


def test_the_readings_of_a_night_stay_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "_MOST_READINGS", 16)
    regulator = Regulator(
        CapacityLimiter(2), lambda: parse_metrics(""), lambda reading: None, auto=False, most=2
    )
    for at in range(1000):
        regulator._keep(reading_at(at))
    kept = [reading.at for reading in regulator.readings]
    assert len(kept) < 16
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (0, 999)
    assert len(kept) >= 8


def reading_at(at: float, rate: float = 100.0) -> Reading:
    return Reading(at, 64, 60, 4, rate, 0.12345, 0)


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 250, 4000])
def test_a_history_has_equal_columns_of_at_most_a_hundred_rows_and_the_last_reading(count: int) -> None:
    readings = [reading_at(50.0 + 2 * number, rate=number) for number in range(-5, count)]
    columns = history(readings, since=49.5)
    assert list(columns) == ["seconds", "limit", "running", "waiting", "tokens_per_second", "kv_cache_usage"]
    assert {len(column) for column in columns.values()} == {min(count, 100)}
    assert columns["seconds"][-1] == 0.5 + 2 * (count - 1)
    assert columns["tokens_per_second"][-1] == count - 1
    assert columns["seconds"] == sorted(columns["seconds"])
    assert columns["seconds"][0] >= 0
    assert columns["kv_cache_usage"][0] in (0.1234, 0.1235)


def test_there_is_no_history_without_readings() -> None:
    assert history([], since=0.0) == {}
    assert history([reading_at(3.0)], since=4.0) == {}
