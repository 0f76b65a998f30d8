"""Captures the samples that are compared alone, before their turn and several at a time.

To be alone, a sample waits until the server is empty, and it takes a while to be full again. With hundreds of
requests in flight, and one sample in a hundred compared, that would be a good part of the time: so those of a
shard and of the next ones are captured together in a row, as soon as the shard is reached. At the beginning
of a run the server is empty anyway.

    shard 0  reached: alone 0.3  1.7  2.1  3.5, then 0.0  0.1  0.2 ...         0.3 is compared when it comes
    shard 4  reached: alone 4.2  ...
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from eagle3_pipeline.extraction.capture import Captured
from eagle3_pipeline.extraction.inspection import Fetch
from eagle3_pipeline.extraction.plan import PlannedSample, ShardPlan

_SAMPLES = 8  # in a row: more would save little, and each is in memory until it is compared


class Alone:
    """The captures of samples that are compared, each there before it is asked for. Close it at the end."""

    def __init__(
        self,
        fetch: Fetch,
        ahead: Callable[[], Iterator[ShardPlan]],
        most_bytes: int,
        bytes_per_token: int,
    ) -> None:
        """`ahead` gives the plans after the shards that were reached; a row of several has `most_bytes`."""
        self._fetch = fetch
        self._ahead = ahead
        self._most_tokens = most_bytes // bytes_per_token
        self._captures: dict[str, asyncio.Task[Captured]] = {}

    def expect(self, samples: Iterable[PlannedSample]) -> None:
        """A shard is reached: capture those of its samples that are compared, unless they are already."""
        row = [one for one in _compared(samples) if one.sample_id not in self._captures]
        if not row:
            return
        for plan in self._ahead():
            further = _compared(plan.samples)
            if not self._leaves_room(row + further):
                break
            row += further
        for sample in row:
            capture = asyncio.create_task(self._fetch(sample, alone=True))
            self._captures[sample.sample_id] = capture

    def _leaves_room(self, row: Sequence[PlannedSample]) -> bool:
        return len(row) <= _SAMPLES and sum(len(one.token_ids) for one in row) <= self._most_tokens

    async def captured(self, sample: PlannedSample) -> Captured:
        """The states of a sample that was expected, once; raises what the fetch raises."""
        return await self._captures.pop(sample.sample_id)

    async def forget(self, sample: PlannedSample) -> None:
        """It is not compared after all: it is unusable by itself."""
        if (capture := self._captures.pop(sample.sample_id, None)) is not None:
            await _end([capture])

    async def close(self) -> None:
        """Leave nothing running and nothing in memory."""
        captures, self._captures = list(self._captures.values()), {}
        await _end(captures)


def _compared(samples: Iterable[PlannedSample]) -> list[PlannedSample]:
    return [sample for sample in samples if sample.is_compared]


async def _end(captures: Sequence[asyncio.Task[Captured]]) -> None:
    for capture in captures:
        capture.cancel()
    await asyncio.gather(*captures, return_exceptions=True)
