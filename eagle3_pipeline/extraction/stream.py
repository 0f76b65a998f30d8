"""Samples in flight over the borders of shards, taken in their order.

    requests   s0.7  s0.8 | s1.0  s1.1  s1.2     at the server (as many as it may have at once)
    taken      ... s0.6                          in order, so that the same samples give the same parts
    between    captured, waiting for an earlier one or for their file

The next shard's samples are sent while the last ones of this shard are still at the server, so
that it never runs dry. Everything between a request and the writer is bounded in bytes: nothing more is
asked for while that much is on its way, so neither the staging folder nor the memory can grow beyond it.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.extraction.inspection import Inspector, Outcome
from eagle3_pipeline.extraction.plan import PlannedSample
from eagle3_pipeline.extraction.progress import Progress
from eagle3_pipeline.extraction.shard_extraction import ShardExtraction
from eagle3_pipeline.manifest import Manifest

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Bounds:
    """How much may be on its way from the server to the writer; a single sample always may."""

    bytes: int
    samples: int
    bytes_per_token: int

    def leave_room(self, samples: int, size: int, more: int) -> bool:
        """Whether one more sample of `more` bytes may be asked for."""
        return not samples or (samples < self.samples and size + more <= self.bytes)


@dataclass(frozen=True)
class _Queued:
    work: ShardExtraction
    sample: PlannedSample | None = None
    """None where the shard ends."""
    task: asyncio.Task[Outcome] | None = None
    size: int = 0


async def stream(
    works: Iterable[ShardExtraction],
    inspector: Inspector,
    bounds: Bounds,
    progress: Progress,
    on_finished: Callable[[Manifest], None],
) -> None:
    """Extract all missing samples of `works`, which are opened one by one as they are reached.

    `on_finished` is called on this thread with each shard's manifest, in order. Raises what Inspector.outcome
    and ShardExtraction raise; then nothing is left running, and finished shards and parts stand. Only where
    the states of a sample depend on what else is at the server are the parts of its shard given up.
    """
    opened: list[ShardExtraction] = []
    ahead = _Ahead(_jobs(works, opened, inspector, progress), inspector, bounds)
    try:
        while (first := ahead.take_first()) is not None:
            if first.sample is None or first.task is None:
                on_finished(await _in_thread(first.work.finish))
                opened.remove(first.work)
            else:
                outcome = await _outcome(first.work, first.task)
                await _take(first.work, first.sample, outcome, progress)
    finally:
        await ahead.cancel()
        for work in opened:
            work.close()


class _Ahead:
    """What is asked for before its turn: as much as the bounds allow."""

    def __init__(
        self,
        jobs: Iterator[tuple[ShardExtraction, PlannedSample | None]],
        inspector: Inspector,
        bounds: Bounds,
    ) -> None:
        self._jobs = jobs
        self._inspector = inspector
        self._bounds = bounds
        self._queue: deque[_Queued] = deque()
        self._held: tuple[ShardExtraction, PlannedSample | None] | None = None
        """Did not fit within the bounds."""

    def take_first(self) -> _Queued | None:
        """Ask for what fits, and take out what comes first; None at the end."""
        self._fill()
        return self._queue.popleft() if self._queue else None

    def _fill(self) -> None:
        on_its_way = sum(one.size for one in self._queue)
        while (job := self._held or next(self._jobs, None)) is not None:
            work, sample = self._held = job
            size = self._size(sample) if sample else 0
            if not self._bounds.leave_room(len(self._queue), on_its_way, size):
                return
            self._held = None
            task = asyncio.create_task(self._inspector.outcome(sample)) if sample else None
            self._queue.append(_Queued(work, sample, task, size))
            on_its_way += size

    def _size(self, sample: PlannedSample) -> int:
        # One that is compared is there twice.
        captures = 2 if self._inspector.compares(sample) else 1
        return captures * len(sample.token_ids) * self._bounds.bytes_per_token

    async def cancel(self) -> None:
        """Leave nothing running."""
        running = [one.task for one in self._queue if one.task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _jobs(
    works: Iterable[ShardExtraction],
    opened: list[ShardExtraction],
    inspector: Inspector,
    progress: Progress,
) -> Iterator[tuple[ShardExtraction, PlannedSample | None]]:
    """Each missing sample of each shard, and None where a shard ends."""
    for work in works:
        opened.append(work)
        progress.stand(work.standing)
        missing = work.missing
        inspector.expect(missing)
        for sample in missing:
            yield work, sample
        yield work, None


async def _outcome(work: ShardExtraction, task: asyncio.Task[Outcome]) -> Outcome:
    try:
        return await task
    except QualityError:
        # Not of this sample alone: what is in the parts may be as wrong, and no later run compares it.
        await _in_thread(work.give_up)
        raise


async def _take(work: ShardExtraction, sample: PlannedSample, outcome: Outcome, progress: Progress) -> None:
    await _in_thread(partial(work.take, sample, outcome))
    if outcome.captured is None:
        progress.quarantined()
    else:
        progress.captured(len(sample.token_ids), outcome.captured.states.nbytes)


async def _in_thread(function: Callable[[], _Result]) -> _Result:
    """Run `function`, which may write gigabytes, in a thread; a cancelled wait waits for its end."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await running
        raise
