import pytest

from eagle3_pipeline.generation.progress import Pulse
from eagle3_pipeline.samples.sample import Sample


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def sample(tokens: int, *, truncated: bool) -> Sample:
    return Sample(
        sample_id="x-t0",
        prompt_id="x",
        turn=0,
        prompt_token_ids=[1],
        completion_token_ids=[2] * tokens,
        finish_reason="length" if truncated else "stop",
        content="",
        reasoning="",
        usage={},
        sampling={},
        server="",
        verdict="truncated" if truncated else "good",
    )


def run(pulse: Pulse, clock: Clock, replies: int, seconds_each: float, tokens: int = 100) -> None:
    for _ in range(replies):
        pulse.sent("x")
        clock.now += seconds_each
        pulse.returned("x")
        pulse.replied(sample(tokens, truncated=False))


def test_rates_now_look_at_the_last_half_minute_and_the_mean_at_all(clock: Clock) -> None:
    pulse = Pulse(1000, 0, longest=512, clock=clock)
    run(pulse, clock, 30, 10)  # 300 s at 0.1 requests/s
    run(pulse, clock, 60, 0.5)  # 30 s at 2 requests/s
    now, tokens_now, mean, tokens_mean = pulse.rates()
    assert now == pytest.approx(2, rel=0.05)
    assert tokens_now == pytest.approx(200, rel=0.05)
    assert mean == pytest.approx(90 / 330)
    assert tokens_mean == pytest.approx(9000 / 330)


def test_the_time_left_is_a_range_between_the_two_rates(clock: Clock) -> None:
    pulse = Pulse(190, 0, longest=512, clock=clock)
    run(pulse, clock, 30, 10)
    run(pulse, clock, 60, 0.5)
    left = pulse.time_left_s()
    assert left is not None
    assert left[0] == pytest.approx(100 / 2, rel=0.05)
    assert left[1] == pytest.approx(100 / (90 / 330))
    assert pulse.vitals().line().endswith("49 s to 6 min left")


def test_a_young_run_promises_nothing(clock: Clock) -> None:
    pulse = Pulse(100, 0, longest=512, clock=clock)
    assert pulse.time_left_s() is None
    run(pulse, clock, 3, 1)
    assert pulse.time_left_s() is None
    assert "left" not in pulse.vitals().line()


def test_the_start_of_the_server_and_earlier_calls_are_in_no_rate(clock: Clock) -> None:
    pulse = Pulse(100, 40, longest=512, clock=clock)
    clock.now += 1320  # the server loads
    run(pulse, clock, 10, 1)
    assert pulse.rates()[2] == pytest.approx(1)
    assert pulse.done == 50
    assert pulse.vitals().line().startswith("50/100 replies (40 from before), 0 in flight, 1.0 requests/s")


def test_errors_are_counted_by_reason_and_turns_that_are_dropped_leave_the_total(clock: Clock) -> None:
    pulse = Pulse(10, 0, longest=512, clock=clock)
    for reason in ("HTTP 503", "HTTP 503", "timeout"):
        pulse.failed(reason)
    pulse.dropped(2)
    pulse.sent("x")
    clock.now += 1
    pulse.replied(sample(50, truncated=True))
    line = pulse.vitals().line()
    assert line.startswith("1/8 replies, 1 in flight")
    assert "errors: 2 x HTTP 503, 1 x timeout" in line
    assert "mean length 50 tokens, 100.0% truncated" in line


def test_a_stalled_run_shows_no_speed_now_and_still_a_time_left(clock: Clock) -> None:
    pulse = Pulse(100, 0, longest=512, clock=clock)
    run(pulse, clock, 10, 1)
    clock.now += 90
    assert pulse.rates()[:2] == (0, 0)
    assert "about 15 min left" in pulse.vitals().line()
