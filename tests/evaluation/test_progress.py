import logging

import pytest

from eagle3_pipeline.evaluation.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_line_says_how_much_is_done_what_comes_and_how_long_the_rest_may_take(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    progress = Progress(6, clock=clock)
    assert progress.line() == "0/6 measurements"
    with caplog.at_level(logging.INFO):
        progress.say("starting the server with the draft")
    assert caplog.messages == ["0/6 measurements, starting the server with the draft"]
    for _ in range(2):
        clock.now += 100
        progress.add()
    assert progress.line() == "2/6 measurements, starting the server with the draft, about 7 min left"


def test_what_was_measured_before_costs_no_time() -> None:
    clock = Clock()
    progress = Progress(4, clock=clock)
    progress.stand(2)
    assert progress.line() == "2/4 measurements (2 from before)"
    clock.now += 30
    progress.add()
    assert progress.line() == "3/4 measurements (2 from before), about 30 s left"
    progress.add()
    assert progress.line() == "4/4 measurements (2 from before)"
