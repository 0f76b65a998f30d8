"""Waves: contiguous, complete, as even as can be, and as few as fit."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.samples.byte_plan import BytePlan, ShardLengths
from eagle3_pipeline.samples.wave_plan import plan_waves, split
from eagle3_pipeline.shards.format import ShardLayout

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=8)


def plan_of(sizes: list[int], extracted: int = 0, judging: int = 0) -> BytePlan:
    """Shards of so many samples of four bytes; the first ones may be extracted already.

    Each sample is two tokens of a reply; the first `judging` ones judge.
    """
    shards = [
        ShardLengths(f"s{number}", [(0, 2)] * size, is_extracted=number < extracted)
        for number, size in enumerate(sizes)
    ]
    shards[0] = replace(shards[0], judging=judging)
    return BytePlan(shards, longest=10**6, layout=ShardLayout((1,), 1, "m"))


def most_waves(plan: BytePlan) -> int:
    """One for each shard, but those before the first one that trains are in its wave."""
    trains = [len(one.lengths) > one.judging for one in plan.shards]
    return len(trains) - (trains.index(True) if any(trains) else len(trains) - 1)


def largest(sizes: list[int], ranges: list[range]) -> int:
    return max(sum(sizes[number] for number in one) for one in ranges)


@given(SIZES, st.integers(1, 8))
def test_a_split_is_contiguous_complete_without_empty_ranges_and_its_largest_is_smallest(
    sizes: list[int], count: int
) -> None:
    count = min(count, len(sizes))
    found = split(sizes, count)
    assert [number for one in found for number in one] == list(range(len(sizes)))
    assert len(found) == count
    assert all(found)
    cuts = itertools.combinations(range(1, len(sizes)), count - 1)
    ways = [[range(a, b) for a, b in itertools.pairwise((0, *inner, len(sizes)))] for inner in cuts]
    assert largest(sizes, found) == min(largest(sizes, way) for way in ways)


@given(SIZES, st.integers(1, 400), st.integers(0, 25))
def test_auto_takes_the_fewest_waves_that_fit(sizes: list[int], room: int, judging: int) -> None:
    plan = plan_of(sizes, judging=judging)
    found = plan_waves(plan, "auto", room)
    counts = range(1, most_waves(plan) + 1)
    fitting = [count for count in counts if plan_waves(plan, count, room).needed <= room]
    assert len(found.waves) == (min(fitting) if fitting else most_waves(plan))
    assert (found.needed <= room) == bool(fitting)


@pytest.mark.parametrize(
    ("sizes", "waves", "expected"),
    [
        ([10, 10, 10, 10, 10, 10, 10], 3, [3, 3, 1]),
        ([30, 1, 1, 1, 1], 2, [1, 4]),
        ([1, 1, 1], 5, [1, 1, 1]),  # a pilot of three shards cannot have five
        ([7], 1, [1]),
    ],
)
def test_so_many_waves_as_asked_for_at_most_one_per_shard(
    sizes: list[int], waves: int, expected: list[int]
) -> None:
    plan = plan_waves(plan_of(sizes), waves, 10**9)
    assert [len(wave) for wave in plan.waves] == expected
    assert [name for wave in plan.waves for name in wave] == [f"s{number}" for number in range(len(sizes))]


def test_a_copy_of_the_samples_that_judge_lies_beside_every_wave_but_not_beside_all_states_at_once() -> None:
    plan = plan_of([10] * 10, judging=3)  # 40 bytes each
    assert plan.validation_bytes == 12
    assert plan_waves(plan, 1, 0).needed == 400
    assert plan_waves(plan, 2, 0).needed == 200 + 12
    assert plan_waves(plan, 10, 0).needed == 40 + 12


@given(SIZES, st.integers(0, 25), st.integers(1, 8))
def test_the_first_wave_has_a_sample_that_trains_wherever_there_is_one(
    sizes: list[int], judging: int, count: int
) -> None:
    plan = plan_of(sizes, judging=judging)
    found = plan_waves(plan, count, 10**9)
    assert [name for wave in found.waves for name in wave] == [f"s{number}" for number in range(len(sizes))]
    assert len(found.waves) == min(count, most_waves(plan))
    training = dict(zip(found.waves[0], plan.training, strict=False))
    assert any(training.values()) or not any(plan.training)


def test_a_shard_that_only_judges_is_no_wave_of_its_own() -> None:
    plan = plan_of([1, 1, 1, 1], judging=1)
    assert plan.training == [0, 1, 1, 1]
    assert plan_waves(plan, 9, 10**9).waves == [["s0", "s1"], ["s2"], ["s3"]]


@pytest.mark.parametrize(("while_generating", "expected"), [(False, (1, 2)), (True, (1, 1))])
def test_a_sample_trains_or_judges_with_two_tokens_of_its_reply(
    while_generating: bool, expected: tuple[int, int]
) -> None:
    lengths = [(6, 9), (7, 9), (2, 4), (6, 8 + while_generating), (7, 20)]
    shard = ShardLengths("s0", lengths, is_extracted=False, judging=2)
    plan = BytePlan([shard], 8, ShardLayout((1, 2), 1, "m"), while_generating=while_generating)
    assert (plan.judges, sum(plan.training)) == expected


def test_samples_that_judge_count_with_what_is_extracted_of_them() -> None:
    lengths = [(2, 9), (9, 12), (3, 6)]
    shard = ShardLengths("s0", lengths, is_extracted=False, judging=2)
    plan = BytePlan([shard], longest=8, layout=ShardLayout((1, 2), 1, "m"))
    assert plan.validation_bytes == 8 * 4  # nothing is left of the reply of the second


def test_states_that_are_there_already_ask_for_no_wave_of_their_own() -> None:
    assert len(plan_waves(plan_of([10] * 4, judging=4), "auto", 80).waves) == 4
    assert len(plan_waves(plan_of([10] * 4, extracted=3), "auto", 80).waves) == 1


def test_the_borders_of_waves_do_not_move_with_what_lies_on_the_disk() -> None:
    sizes = [10, 30, 20, 10, 30, 20]
    anew = plan_waves(plan_of(sizes), 3, 10**9)
    assert [len(wave) for wave in anew.waves] == [2, 2, 2]
    for extracted in range(1, 6):
        assert plan_waves(plan_of(sizes, extracted), 3, 10**9).waves == anew.waves
    # The third wave of 200 bytes is still to come, and the copy of the samples that judge.
    assert plan_waves(plan_of(sizes, extracted=4, judging=5), 3, 10**9).needed == 200 + 20
