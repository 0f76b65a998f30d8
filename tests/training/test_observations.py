"""What is shown of a training while it works: every epoch, and in all never more than Dagster plots."""

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.training.events import describe
from eagle3_pipeline.training.observations import MOST, Observations


def _start(steps: int, epochs: int, step: int = 0) -> dict[str, Any]:
    return {
        "event": "start", "step": step, "steps": steps, "epochs": epochs, "parameters": 7, "samples": 5,
        "rows": 90, "held_out": 1, "without_supervision": 0, "device": "cpu",
    }  # fmt: skip


def _step(step: int, steps: int = 1000) -> dict[str, Any]:
    return {
        "event": "step", "step": step, "steps": steps, "epoch": 0, "epochs": 2, "loss": 3.5,
        "accuracy": [0.5, 0.25], "tokens_per_second": 1234.5, "seconds_left": 61,
    }  # fmt: skip


def _epoch(epoch: int, step: int = 10) -> dict[str, Any]:
    return {
        "event": "epoch", "epoch": epoch, "epochs": 2, "step": step, "loss": 2.5, "is_best": True,
        "acceptance_length": 1.5, "accuracy_by_position": [0.5, 0.25],
    }  # fmt: skip


def _end(number: int = 1, of: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "event": "alternative", "alternative": "low", "number": number, "of": of, "acceptance_length": 1.5,
        "loss": 2.5, "steps": 40, "seconds": 3.0, "failed": None, **changes,
    }  # fmt: skip


@given(
    trainings=st.integers(1, 130),
    epochs=st.integers(1, 150),
    steps=st.integers(1, 3000),
    resumed=st.floats(0, 1),
)
def test_no_more_than_a_hundred_are_shown_and_all_epochs_where_they_are_fewer(
    trainings: int, epochs: int, steps: int, resumed: float
) -> None:
    chosen, shown = Observations(trainings), 0
    for _ in range(trainings):
        done = int(resumed * steps)
        events = [_start(steps, epochs, done), {**_epoch(-1, 0), "event": "start_judged", "chance": 0.1}]
        events += [_step(step, steps) for step in range(done + 1, steps + 1, 7)]
        events += [_epoch(epoch) for epoch in range(epochs)]
        kinds = [event["event"] for event in events if chosen.of(event) is not None]
        if epochs + 2 <= MOST // trainings:
            assert kinds.count("epoch") == epochs
            assert "start_judged" in kinds
        shown += len(kinds) + (chosen.of(_end()) is not None)
    assert shown <= MOST


def test_steps_are_thinned_out_evenly_over_those_planned() -> None:
    chosen = Observations()
    chosen.of(_start(98_000, 2))
    shown = [step for step in range(98_001) if chosen.of(_step(step)) is not None]
    assert len(shown) == 96
    assert {after - before for before, after in pairwise(shown)} <= {1020, 1021}


def test_an_attempt_that_goes_on_shows_nothing_for_what_was_done_before() -> None:
    chosen = Observations()
    chosen.of(_start(980, 2, step=490))
    assert [chosen.of(_step(step)) is not None for step in (490, 500, 501)] == [False, False, True]


def test_what_is_shown_are_numbers_to_plot_and_a_line_to_read() -> None:
    chosen = Observations()
    assert chosen.of(_start(10, 2)) is None
    assert chosen.of(_step(10)) == {
        "step": 10.0,
        "loss": 3.5,
        "tokens_per_second": 1234.5,
        "seconds_left": 61.0,
        "accuracy_1": 0.5,
        "accuracy_2": 0.25,
        "news": describe(_step(10)),
    }
    assert chosen.of(_epoch(0)) == {
        "step": 10.0,
        "validation_loss": 2.5,
        "acceptance_length": 1.5,
        "validation_accuracy_1": 0.5,
        "validation_accuracy_2": 0.25,
        "news": describe(_epoch(0)),
    }


def test_numbers_of_an_alternative_have_its_name_so_that_each_has_a_plot_of_its_own() -> None:
    chosen = Observations(2)
    chosen.of({**_start(10, 2), "alternative": "low"})
    seen = chosen.of({**_epoch(0), "alternative": "low"})
    assert seen is not None
    assert seen["low/acceptance_length"] == 1.5
    assert chosen.of(_end()) == {
        "low/step": 40.0,
        "low/loss": 2.5,
        "low/acceptance_length": 1.5,
        "news": "alternative low (1 of 1): acceptance length 1.500, loss 2.500, 40 steps in 3 s",
    }


def test_an_alternative_that_failed_says_why_and_has_no_numbers() -> None:
    none = dict.fromkeys(("acceptance_length", "loss", "steps", "seconds"))
    seen = Observations().of(_end(failed="loss nan", **none))
    assert seen == {"news": "alternative low (1 of 1) failed: loss nan"}
