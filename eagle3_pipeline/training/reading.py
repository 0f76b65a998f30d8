"""Batches that are read by a thread while the ones before them are worked on."""

import time
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Self

from eagle3_pipeline.training.batches import Batch, SampleSource, pack

# Batches in memory besides the one at work. More than one, since the disk is not equally fast all the time,
# and few, since 8,192 tokens of a large target are half a gigabyte.
AHEAD = 3


class ReadAhead:
    """Iterates over the batches of `planned`, in order; close it where the end is not reached."""

    def __init__(self, source: SampleSource, planned: Iterable[tuple[int, ...]]) -> None:
        self.waited = 0.0
        """Seconds that the caller stood still for a batch that was not read yet, so far."""
        self._batches = self._read(source, planned)

    def _read(self, source: SampleSource, planned: Iterable[tuple[int, ...]]) -> Generator[Batch, None, None]:
        remaining = iter(planned)
        reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reader")
        try:
            ahead: deque[Future[Batch]] = deque()

            def read(batches: int) -> None:
                for indices in islice(remaining, batches):
                    source.prefetch(indices)
                    ahead.append(reader.submit(pack, source, indices))

            read(AHEAD)
            while ahead:
                began = time.monotonic()
                batch = ahead.popleft().result()
                self.waited += time.monotonic() - began
                read(1)
                yield batch
        finally:
            reader.shutdown(cancel_futures=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """End the thread; batches that it has read are dropped."""
        self._batches.close()
