"""Samples in flight over the borders of shards, taken in their order.

    requests   s0.7  s0.8 | s1.0  s1.1  s1.2     at the server (at most `in_flight`)
    taken      ... s0.6                          in order, so that the same samples give the same parts
    between    captured, waiting for an earlier one: together with those in flight at most 2 x `in_flight`

The next shard's samples are sent while the last ones of this shard are still at the server, so
that it never runs dry.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from eagle3_pipeline.extraction.capture import Capture, SampleRefusedError
from eagle3_pipeline.extraction.checks import reason_against
from eagle3_pipeline.extraction.plan import PlannedSample
from eagle3_pipeline.extraction.progress import Progress
from eagle3_pipeline.extraction.shard_extraction import Outcome, ShardExtraction
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.shards.format import ShardLayout

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Queued = tuple[ShardExtraction, PlannedSample | None, asyncio.Task[Outcome] | None]


async def stream(
    works: Iterable[ShardExtraction],
    capture: Capture,
    layout: ShardLayout,
    window: int,
    progress: Progress,
    on_finished: Callable[[Manifest], None],
) -> None:
    """Extract all missing samples of `works`, which are opened one by one as they are reached.

    At most `window` samples are between their request and the writer. `on_finished` is called on
    this thread with each shard's manifest, in order. Raises what Capture.fetch and ShardExtraction raise;
    then nothing is left running, and finished shards and parts stand.
    """
    opened: list[ShardExtraction] = []
    jobs = _jobs(works, opened, progress)
    queue: deque[_Queued] = deque()
    try:
        while True:
            while len(queue) < window and (job := next(jobs, None)) is not None:
                work, sample = job
                task = asyncio.create_task(_outcome(capture, sample, layout)) if sample else None
                queue.append((work, sample, task))
            if not queue:
                return
            work, sample, task = queue.popleft()
            if sample is None or task is None:
                on_finished(await _in_thread(work.finish))
                opened.remove(work)
                continue
            await _take(work, sample, await task, progress)
    finally:
        running = [task for _, _, task in queue if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for work in opened:
            work.close()


def _jobs(
    works: Iterable[ShardExtraction], opened: list[ShardExtraction], progress: Progress
) -> Iterator[tuple[ShardExtraction, PlannedSample | None]]:
    """Each missing sample of each shard, and None where a shard ends."""
    for work in works:
        opened.append(work)
        progress.stand(work.standing)
        for sample in work.missing:
            yield work, sample
        yield work, None


async def _outcome(capture: Capture, sample: PlannedSample, layout: ShardLayout) -> Outcome:
    try:
        captured = await capture.fetch(sample.token_ids)
    except SampleRefusedError as error:
        _logger.warning(f"the extraction server refuses {sample.sample_id}: {error}")
        return Outcome(None, "refused_by_server")
    reason = await asyncio.to_thread(
        reason_against,
        sample.token_ids,
        captured.token_ids,
        captured.states,
        len(layout.layer_ids),
        layout.hidden_size,
    )
    return Outcome(None, reason) if reason else Outcome(captured)


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
