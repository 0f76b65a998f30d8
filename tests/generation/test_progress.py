"""The pulse by a clock that goes when it is told to, and a long-tailed job whose truth is known."""

import dataclasses
import heapq
import json
import random
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from eagle3_pipeline.generation.concurrency import Reading
from eagle3_pipeline.generation.progress import Pulse
from eagle3_pipeline.generation.vitals import Vitals
from eagle3_pipeline.samples.sample import Sample, Verdict


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def sample(name: str, tokens: int, verdict: Verdict = "good") -> Sample:
    values: dict[str, Any] = {one.name: None for one in dataclasses.fields(Sample)}
    return Sample(**{**values, "sample_id": name, "completion_token_ids": [2] * tokens, "verdict": verdict})


def measure(pulse: Pulse, clock: Clock, tokens_per_second: float, seconds: float = 2) -> None:
    """A reading of the server `seconds` after the one before."""
    clock.now += seconds
    pulse.measured(Reading(clock.now, 8, 8, 0, tokens_per_second, 0.5, 0))


def answer(pulse: Pulse, name: str, tokens: int, verdict: Verdict = "good") -> None:
    pulse.returned(name)
    pulse.replied(sample(name, tokens, verdict))


def run(pulse: Pulse, clock: Clock, replies: int, seconds_each: float, tokens: int = 100) -> None:
    """Replies to one request after the other."""
    for _ in range(replies):
        pulse.sent("x")
        clock.now += seconds_each
        answer(pulse, "x", tokens)


# --- rates


def test_rates_now_look_at_the_last_minute_and_the_mean_at_all(clock: Clock) -> None:
    pulse = Pulse(1000, 0, longest=512, clock=clock)
    run(pulse, clock, 30, 10)  # 300 s at 0.1 requests/s
    run(pulse, clock, 120, 0.5)  # 60 s at 2 requests/s
    vitals = pulse.vitals()
    assert vitals.requests_per_second == pytest.approx(2, rel=0.05)
    assert vitals.tokens_per_second == pytest.approx(200, rel=0.05)
    assert vitals.requests_per_second_mean == pytest.approx(150 / 360)
    assert vitals.tokens_per_second_mean == pytest.approx(15000 / 360)


def test_tokens_now_are_those_of_the_server_while_it_was_asked_just_now(clock: Clock) -> None:
    pulse = Pulse(1000, 0, longest=512, clock=clock)
    run(pulse, clock, 60, 1)
    measure(pulse, clock, 0)
    measure(pulse, clock, 3000)
    measure(pulse, clock, 0, seconds=1)  # one poor moment is not the last minute
    clock.now += 10
    assert pulse.vitals().tokens_per_second == 2000
    clock.now += 10
    assert pulse.vitals().tokens_per_second == pytest.approx(100, rel=0.05)


def test_what_a_dead_server_made_is_not_now(clock: Clock) -> None:
    pulse = Pulse(1000, 0, longest=512, clock=clock)
    run(pulse, clock, 60, 1)
    measure(pulse, clock, 0)
    measure(pulse, clock, 3000)
    pulse.server_starts()
    assert pulse.vitals().tokens_per_second == pytest.approx(100, rel=0.1)


def test_tokens_so_far_of_running_requests_are_in_the_mean(clock: Clock) -> None:
    pulse = Pulse(1000, 0, longest=512, clock=clock)
    run(pulse, clock, 10, 1)  # 100 tokens/s of one request
    pulse.sent("long")
    clock.now += 4
    assert pulse.vitals().tokens_per_second_mean == pytest.approx((1000 + 400) / 14)
    clock.now += 96  # more than 512 tokens it cannot have
    assert pulse.vitals().tokens_per_second_mean == pytest.approx((1000 + 512) / 110)


def test_the_minutes_without_a_server_are_in_no_rate(clock: Clock) -> None:
    pulse = Pulse(100, 40, longest=512, clock=clock)
    for _ in range(2):
        pulse.server_starts()
        clock.now += 1320  # the server loads
        assert ", waiting for the server, 0 in flight" in pulse.vitals().line()
        run(pulse, clock, 10, 1)
    vitals = pulse.vitals()
    assert vitals.requests_per_second_mean == pytest.approx(1)
    assert vitals.requests_per_second == pytest.approx(1)
    assert vitals.line().startswith("60/100 replies (40 from before), 0 in flight, 1.0 requests/s and 100 ")


# --- lengths


def test_running_requests_correct_the_mean_length(clock: Clock) -> None:
    pulse = Pulse(100, 0, longest=512, clock=clock)
    pulse.sent("long")
    run(pulse, clock, 3, 1)
    vitals = pulse.vitals()
    assert vitals.mean_length == 100
    assert vitals.corrected_length is not None
    assert vitals.corrected_length.low == pytest.approx(100 + 200 / 4)  # the long one has 300 tokens
    assert vitals.corrected_length.high == pytest.approx(100 + 412 / 4)
    assert "mean length 100 tokens (corrected 150 to 203)" in vitals.line()
    answer(pulse, "long", 300)
    assert "mean length 150 tokens (corrected 150)" in pulse.vitals().line()


def test_while_nothing_is_finished_no_length_and_no_time_is_told(clock: Clock) -> None:
    pulse = Pulse(100, 0, longest=512, clock=clock)
    pulse.sent("long")
    clock.now += 60
    vitals = pulse.vitals()
    assert (vitals.mean_length, vitals.corrected_length, vitals.seconds_left) == (None, None, None)
    assert vitals.line() == "0/100 replies, 1 in flight"


def test_a_request_cut_by_the_death_of_its_server_stays_as_longer_than_it_was(clock: Clock) -> None:
    pulse = Pulse(100, 0, longest=512, clock=clock)
    pulse.sent("long")
    run(pulse, clock, 3, 1)
    pulse.returned("long")  # without a reply
    before = pulse.vitals().corrected_length
    assert before is not None
    assert before.low == pytest.approx(150)
    pulse.sent("long")  # another server
    clock.now += 1
    answer(pulse, "long", 100)
    after = pulse.vitals().corrected_length
    assert after is not None
    assert after.low == pytest.approx(100 + 200 / 5)


def test_a_refused_request_has_no_length(clock: Clock) -> None:
    pulse = Pulse(100, 0, longest=512, clock=clock)
    run(pulse, clock, 3, 1)
    pulse.sent("y")
    answer(pulse, "y", 0, "refused")
    vitals = pulse.vitals()
    assert vitals.mean_length == 100
    assert vitals.share("refused") == 1 / 4


# --- what is shown


def test_errors_are_counted_by_reason_and_turns_that_are_dropped_leave_the_total(clock: Clock) -> None:
    pulse = Pulse(12_010, 0, longest=512, clock=clock)
    for reason in ("timeout", "HTTP 503", "HTTP 503"):
        pulse.failed(reason)
    pulse.dropped(2)
    verdicts: list[Verdict] = ["truncated", "degenerate", "good", "good"]
    for verdict in verdicts:
        pulse.sent("x")
        clock.now += 1
        answer(pulse, "x", 50, verdict)
    line = pulse.vitals().line()
    assert line.startswith("4/12,008 replies, 0 in flight, ")
    assert "25.0% truncated, 25.0% rejected, errors: 2 x HTTP 503, 1 x timeout" in line


def test_the_time_left_is_a_range(clock: Clock) -> None:
    pulse = Pulse(190, 0, longest=512, clock=clock)
    run(pulse, clock, 30, 10)
    run(pulse, clock, 60, 0.5)
    left = pulse.vitals().seconds_left
    assert left is not None
    assert left.low < 100 / (60.5 / 60) < 100 / (90 / 330) < left.high
    assert pulse.vitals().line().endswith(" left")


def test_a_young_run_promises_nothing_and_nor_does_one_that_is_over(clock: Clock) -> None:
    pulse = Pulse(20, 0, longest=512, clock=clock)
    run(pulse, clock, 3, 1)
    assert "left" not in pulse.vitals().line()
    run(pulse, clock, 16, 1)
    assert "left" in pulse.vitals().line()
    run(pulse, clock, 1, 1)
    assert pulse.vitals().line().startswith("20/20 replies")
    assert "left" not in pulse.vitals().line()


def test_a_stalled_run_shows_no_speed_now_and_still_a_time_left(clock: Clock) -> None:
    pulse = Pulse(100, 0, longest=512, clock=clock)
    run(pulse, clock, 10, 1)
    pulse.sent("stuck")
    clock.now += 90
    vitals = pulse.vitals()
    assert vitals.requests_per_second == vitals.tokens_per_second == 0
    assert "0.0 requests/s and 0 tokens/s now" in vitals.line()
    assert vitals.seconds_left is not None


def test_all_numbers_are_json_and_those_for_plots_are_floats(clock: Clock) -> None:
    pulse = Pulse(100, 7, longest=512, clock=clock)
    nothing = pulse.vitals()
    run(pulse, clock, 10, 1)
    pulse.failed("timeout")
    vitals = pulse.vitals()
    read = json.loads(json.dumps(vitals.to_json()))
    assert read["line"] == vitals.line()
    assert (read["done"], read["total"], read["errors"]) == (17, 100, {"timeout": 1})
    assert read["seconds_left"].keys() == {"low", "high"}
    assert all(type(one) is float for one in vitals.numbers().values())
    assert vitals.numbers().keys() > nothing.numbers().keys()
    assert {"corrected_length_low", "seconds_left_high"} <= vitals.numbers().keys()


# --- a job with a known truth

LONGEST, SLOTS, COUNT = 8192, 200, 25_000
Age = Literal["1%", "5%", "25%", "50%"]
AGES: dict[int, Age] = {COUNT // 100: "1%", COUNT // 20: "5%", COUNT // 4: "25%", COUNT // 2: "50%"}


@dataclasses.dataclass
class Truth:
    """What a job was like in the end, and what its pulse said on the way: seconds left then, vitals."""

    mean_length: float
    said: dict[Age, tuple[float, Vitals]]


def long_tailed_job(seed: int) -> Truth:
    """25,000 requests over 200 slots: 0.3 s to the first token, then 15 tokens/s give or take a tenth."""
    chance = random.Random(seed)
    lengths = [max(1, min(LONGEST, int(chance.lognormvariate(6.8, 1.0)))) for _ in range(COUNT)]
    clock = Clock()
    pulse = Pulse(COUNT, 0, longest=LONGEST, clock=clock)
    numbers = iter(range(COUNT))
    ends: list[tuple[float, int]] = []

    def send(numbers: Iterator[int]) -> None:
        for number in numbers:
            pulse.sent(str(number))
            seconds = 0.3 + lengths[number] / (15 * chance.uniform(0.9, 1.1))
            heapq.heappush(ends, (clock.now + seconds, number))
            if len(ends) == SLOTS:
                return

    send(numbers)
    at: dict[Age, tuple[float, Vitals]] = {}
    for done in range(1, COUNT + 1):
        clock.now, number = heapq.heappop(ends)
        answer(pulse, str(number), lengths[number], "truncated" if lengths[number] == LONGEST else "good")
        send(numbers)
        if done in AGES:
            at[AGES[done]] = clock.now, pulse.vitals()
    return Truth(sum(lengths) / COUNT, {age: (clock.now - then, said) for age, (then, said) in at.items()})


@pytest.fixture(scope="module")
def jobs() -> list[Truth]:
    return [long_tailed_job(seed) for seed in range(6)]


@pytest.mark.parametrize("age", ["1%", "5%"])
def test_the_corrected_length_of_a_young_job_is_closer_to_the_final_one_than_the_plain_one(
    age: Age, jobs: list[Truth]
) -> None:
    for job in jobs:
        _, said = job.said[age]
        assert said.mean_length is not None
        assert said.corrected_length is not None
        middle = (said.corrected_length.low + said.corrected_length.high) / 2
        assert abs(middle - job.mean_length) < abs(said.mean_length - job.mean_length)
        assert said.corrected_length.low < 1.1 * job.mean_length
        assert said.corrected_length.high > 0.9 * job.mean_length


def test_at_one_percent_the_length_is_a_bound_that_holds_the_truth(jobs: list[Truth]) -> None:
    for job in jobs:
        corrected = job.said["1%"][1].corrected_length
        assert corrected is not None
        assert corrected.low < job.mean_length < corrected.high


@pytest.mark.parametrize("age", ["5%", "25%", "50%"])
def test_the_range_of_the_time_left_holds_the_truth_more_often_than_the_rates_of_requests_do(
    age: Age, jobs: list[Truth]
) -> None:
    held = plainly = 0
    for job in jobs:
        truth, said = job.said[age]
        left = said.seconds_left
        assert left is not None
        held += left.low <= truth <= left.high
        assert 0.85 * left.low <= truth <= 1.15 * left.high
        rates = said.requests_per_second, said.requests_per_second_mean
        plainly += (COUNT - said.done) / max(rates) <= truth <= (COUNT - said.done) / min(rates)
    assert held > plainly
