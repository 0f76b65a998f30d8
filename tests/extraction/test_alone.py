"""Samples that are captured alone before their turn: in which rows, and that none is left behind."""

import asyncio
from collections.abc import Iterator

import pytest
import torch

from eagle3_pipeline.extraction.alone import Alone
from eagle3_pipeline.extraction.capture import Captured, SampleRefusedError
from eagle3_pipeline.extraction.plan import PlannedSample, ShardPlan

TOKENS = 10


def _sample(shard: int, number: int, *, is_compared: bool) -> PlannedSample:
    name = f"{shard}.{number}"
    return PlannedSample(name, [shard] * TOKENS, [1] * TOKENS, is_compared=is_compared)


def _plan(shard: int, compared: int) -> ShardPlan:
    return ShardPlan([_sample(shard, number, is_compared=number < compared) for number in range(12)])


class _Run:
    """Shards with so many compared samples each, reached one after the other."""

    def __init__(self, *compared: int, most_tokens: int = 10**6) -> None:
        self._plans = [_plan(shard, count) for shard, count in enumerate(compared)]
        self._reached = 0
        self.asked: list[str] = []
        self.alone = Alone(self._fetch, self._ahead, most_tokens, 1)

    async def _fetch(self, sample: PlannedSample, *, alone: bool = False, again: bool = False) -> Captured:
        assert alone
        self.asked.append(sample.sample_id)
        await asyncio.sleep(0)
        if sample.sample_id == "0.1":
            raise SampleRefusedError("too long")
        return Captured(torch.tensor(sample.token_ids), torch.zeros(1))

    def _ahead(self) -> Iterator[ShardPlan]:
        yield from self._plans[self._reached :]

    async def reach(self) -> list[str]:
        """Reach the next shard; what is asked for then."""
        before = len(self.asked)
        plan = self._plans[self._reached]
        self._reached += 1
        self.alone.expect(plan.samples)
        for _ in range(3):
            await asyncio.sleep(0)
        return self.asked[before:]


def test_a_row_takes_the_samples_of_the_next_shards_too_up_to_eight() -> None:
    async def rows() -> list[list[str]]:
        run = _Run(2, 3, 2, 2, 0, 1)
        found = [await run.reach() for _ in range(6)]
        await run.alone.close()
        return found

    whole = asyncio.run(rows())
    assert whole == [["0.0", "0.1", "1.0", "1.1", "1.2", "2.0", "2.1"], [], [], ["3.0", "3.1", "5.0"], [], []]


def test_a_row_takes_no_more_than_there_is_room_for_but_always_its_own_shard() -> None:
    async def rows() -> list[list[str]]:
        run = _Run(2, 1, 1, most_tokens=3 * TOKENS)
        found = [await run.reach() for _ in range(3)]
        tight = _Run(2, 1, most_tokens=TOKENS)
        return [*found, await tight.reach(), await tight.reach()]

    assert asyncio.run(rows()) == [["0.0", "0.1", "1.0"], [], ["2.0"], ["0.0", "0.1"], ["1.0"]]


def test_each_is_given_out_once_and_a_refusal_is_raised_where_it_is_asked_for() -> None:
    async def ask() -> None:
        run = _Run(3)
        await run.reach()
        first, second, third = (_sample(0, number, is_compared=True) for number in range(3))
        assert (await run.alone.captured(first)).token_ids.tolist() == first.token_ids
        with pytest.raises(SampleRefusedError):
            await run.alone.captured(second)
        await run.alone.forget(third)
        for sample in (first, second, third):
            with pytest.raises(KeyError):
                await run.alone.captured(sample)

    asyncio.run(ask())


def test_what_is_not_asked_for_is_ended_at_the_end() -> None:
    async def leave() -> set[str]:
        run = _Run(2, 2)
        run.alone.expect([_sample(0, number, is_compared=True) for number in range(2)])
        await run.alone.close()
        return {task.get_name() for task in asyncio.all_tasks()} - {asyncio.current_task().get_name()}

    assert asyncio.run(leave()) == set()
