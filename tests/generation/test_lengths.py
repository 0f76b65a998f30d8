"""The estimate of completion lengths: against curves that are worked out by hand, and its limits."""

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.generation.lengths import Bounds, LengthCurve

LIMIT = 100
lengths = st.lists(st.integers(0, LIMIT), max_size=30)


def test_with_nothing_running_it_is_the_plain_mean() -> None:
    mean = LengthCurve(Counter([10, 20, 20, 50]), [], LIMIT).mean
    assert mean.low == mean.high == pytest.approx(25)


def test_a_curve_that_was_worked_out_by_hand() -> None:
    # At risk 5 at 10 tokens, 3 at 20 (one was cut off at 15), 1 at 40 (one was cut off at 30).
    mean = LengthCurve({10: 1, 20: 1, 40: 1}, [15, 30], LIMIT).mean
    after_10, after_20 = 4 / 5, 4 / 5 * 2 / 3
    assert mean.low == mean.high == pytest.approx(10 + 10 * after_10 + 20 * after_20)


def test_a_running_request_at_the_length_of_a_reply_is_longer_than_it() -> None:
    assert LengthCurve({10: 1}, [10], LIMIT).mean == Bounds(10.0, 10 + 90 / 2)


def test_beyond_the_longest_length_seen_there_is_a_bound_and_no_number() -> None:
    mean = LengthCurve({10: 1}, [40], LIMIT).mean
    assert mean.low == pytest.approx(10 + 30 / 2)
    assert mean.high == pytest.approx(10 + 90 / 2)


def test_replies_that_ran_into_the_limit_are_as_long_as_the_limit_and_leave_nothing_unknown() -> None:
    mean = LengthCurve({10: 1, LIMIT: 1}, [LIMIT], LIMIT).mean
    assert mean.low == mean.high == pytest.approx(10 + 90 * 2 / 3)


def test_a_few_quick_ones_beyond_all_others_do_not_bring_the_curve_to_an_end() -> None:
    mean = LengthCurve({10: 60, 52: 3}, [50] * 40, LIMIT).mean
    assert mean.low == pytest.approx(10 + 40 * 43 / 103)
    assert mean.high == pytest.approx(10 + 90 * 43 / 103)


def test_a_running_request_has_what_is_left_to_those_that_came_as_far() -> None:
    curve = LengthCurve({10: 2, 30: 1, 60: 1}, [20], LIMIT)
    assert curve.left(20) == Bounds(pytest.approx(10 + 30 / 2), pytest.approx(10 + 30 / 2))
    assert curve.left(0) == curve.mean
    assert LengthCurve({10: 1}, [40], LIMIT).left(40) == Bounds(0.0, 60.0)


@given(st.lists(st.integers(0, LIMIT), min_size=1, max_size=30), lengths)
def test_the_mean_lies_between_that_of_what_is_seen_and_the_limit(
    ended: list[int], running: list[int]
) -> None:
    curve = LengthCurve(Counter(ended), running, LIMIT)
    mean = curve.mean
    assert 0 <= mean.low <= mean.high + 1e-9 <= LIMIT + 1e-6
    # Never shorter than if all requests had ended where they are: what is known is only that they are longer.
    seen = [*ended, *running]
    assert mean.high >= sum(seen) / len(seen) - 1e-9
    for so_far in running:
        left = curve.left(so_far)
        assert -1e-9 <= left.low <= left.high + 1e-9 <= LIMIT - so_far + 1e-6


def cost(scale: int) -> float:
    """CPU seconds of what a pulse asks of a job that is `scale` times as large, the least of ten times."""
    longest = 819 * scale
    finished = Counter(1 + number * 7919 % longest for number in range(2500 * scale))
    running = [41 * number % longest for number in range(20 * scale)]
    took = []
    for _ in range(10):
        start = time.process_time()
        curve = LengthCurve(finished, running, longest)
        assert curve.mean.low <= curve.mean.high
        assert len([curve.left(so_far) for so_far in running]) == 20 * scale
        took.append(time.process_time() - start)
    return min(took)


def test_its_cost_grows_with_the_job_and_not_with_its_square() -> None:
    assert cost(10) < 40 * cost(1)
