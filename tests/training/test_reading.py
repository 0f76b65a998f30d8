"""Batches are read ahead, few of them, in order, and what a step waits for them is known."""

import threading
from collections.abc import Mapping, Sequence

import pytest
import torch

from eagle3_pipeline.training.reading import ReadAhead
from tests.training.tiny import Memory, memory

_AHEAD = 3


class _Watched(Memory):
    """Says when a number of reads is reached; may hold reads up, and fail at one."""

    def __init__(self, samples: int, fails_at: int | None = None) -> None:
        super().__init__(memory([(8, 2)] * samples).samples)
        self.reads: list[int] = []
        self.prefetched: list[int] = []
        self.may_read = threading.Event()
        self.may_read.set()
        self.changed = threading.Condition()
        self._fails_at = fails_at

    def read(self, index: int) -> Mapping[str, torch.Tensor]:
        assert self.may_read.wait(10)
        if index == self._fails_at:
            raise OSError("the disk is gone")
        with self.changed:
            self.reads.append(index)
            self.changed.notify_all()
        return super().read(index)

    def prefetch(self, indices: Sequence[int]) -> None:
        with self.changed:
            self.prefetched.extend(indices)
            self.changed.notify_all()

    def wait_for_reads(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.reads) >= count, 10)


def test_batches_come_in_order_and_only_a_few_are_read_before_they_are_wanted() -> None:
    source = _Watched(10)
    ahead = ReadAhead(source, [(index,) for index in range(10)])
    assert source.reads == []  # nothing is read before the first step
    assert next(ahead).indices == (0,)
    source.wait_for_reads(1 + _AHEAD)
    source.may_read.clear()
    assert source.reads == [0, 1, 2, 3]
    source.may_read.set()
    assert [batch.indices for batch in ahead] == [(index,) for index in range(1, 10)]


def test_the_disk_is_asked_for_a_batch_before_the_thread_comes_to_it() -> None:
    source = _Watched(10)
    source.may_read.clear()
    ahead = ReadAhead(source, [(index,) for index in range(10)])
    reader = threading.Thread(target=lambda: next(ahead))
    reader.start()
    with source.changed:
        assert source.changed.wait_for(lambda: source.prefetched == [0, 1, 2], 10)
    source.may_read.set()
    reader.join()
    ahead.close()


def test_time_that_a_step_stands_still_for_its_batch_is_counted_and_other_time_is_not() -> None:
    source = _Watched(6)
    ahead = ReadAhead(source, [(index,) for index in range(6)])
    next(ahead)
    source.wait_for_reads(1 + _AHEAD)
    source.may_read.clear()
    before = ahead.waited
    for _ in range(_AHEAD - 1):
        next(ahead)
    read = ahead.waited - before
    threading.Timer(0.3, source.may_read.set).start()
    before = ahead.waited
    list(ahead)
    assert ahead.waited - before > 0.1 > read


def test_a_read_that_fails_reaches_the_step_that_wanted_it() -> None:
    ahead = ReadAhead(_Watched(6, fails_at=2), [(index,) for index in range(6)])
    assert [next(ahead).indices, next(ahead).indices] == [(0,), (1,)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)


def test_closing_ends_the_thread_though_batches_are_left() -> None:
    ahead = ReadAhead(_Watched(6), [(index,) for index in range(6)])
    next(ahead)
    ahead.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("reader")]
