"""One schedule over all turns, planned from samples alone, that what is missing never prolongs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.training.batches import Split, hold_out
from eagle3_pipeline.training.schedule import StepBatches, make_schedule
from tests.training.tiny import plan

_ROWS = st.lists(st.integers(1, 60), min_size=1, max_size=15)


def _split(sizes: list[list[int]], judges: int = 0) -> Split:
    """Samples of these sizes, of which the first ones judge."""
    rows = dict(enumerate(size for wave in sizes for size in wave))
    numbers = iter(rows)
    first, *others = (tuple(next(numbers) for _ in wave) for wave in sizes)
    return Split((first[judges:], *others), first[:judges], rows, 0)


@given(
    st.lists(_ROWS, min_size=1, max_size=4),
    st.sets(st.integers(0, 59)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
)
@settings(deadline=None, max_examples=60)
def test_samples_that_are_missing_shorten_an_epoch_and_move_no_other_sample(
    sizes: list[list[int]], missing: set[int], passes: int, accumulation: int, processes: int
) -> None:
    split = _split(sizes, judges=len(sizes[0]) // 2)
    settings = {"epochs": 2 * passes, "accumulation": accumulation, "processes": processes}
    for turn in range(len(sizes) * passes):
        one = plan(None, turn=turn, passes=passes, **settings)  # type: ignore[arg-type]
        whole = make_schedule(one, split, lambda _: True)
        short = make_schedule(one, split, lambda index: index not in missing)
        assert short.starts == whole.starts
        assert list(short.epochs) == list(whole.epochs) == [2 * turn, 2 * turn + 1]
        assert short.validation == tuple(one for one in split.validation if one not in missing)
        for epoch, steps in short.epochs.items():
            planned = _samples(whole.epochs[epoch])
            assert _samples(steps) == [index for index in planned if index not in missing]
            assert not set(planned) & set(split.validation)
            assert len(steps) <= whole.starts[epoch + 1] - whole.starts[epoch]


def _samples(steps: list[StepBatches]) -> list[int]:
    return [index for step in steps for batch in step for index in batch]


def test_a_step_has_as_many_smaller_batches_as_processes_go_through_together_and_only_the_last_has_less() -> (
    None
):
    split = _split([[9] * 23])
    one = make_schedule(plan(None, accumulation=2, processes=2, tokens_per_step=72), split, lambda _: True)  # type: ignore[arg-type]
    assert one.batch_rows == 18
    assert [len(step) for step in one.epochs[0]] == [4, 4, 4]
    assert [len(batch) for batch in one.epochs[0][-1]] == [2, 2, 2, 1]
    assert make_schedule(plan(None, tokens_per_step=72), split, lambda _: True).starts == one.starts  # type: ignore[arg-type]


def test_turns_share_the_steps_of_all_epochs_among_them() -> None:
    split = _split([[30, 30], [30], [30, 30, 30]])
    schedules = [make_schedule(plan(None, turn=turn, epochs=1), split, lambda _: True) for turn in range(3)]  # type: ignore[arg-type]
    assert [one.starts for one in schedules] == [(0, 2, 3, 6)] * 3
    assert [(one.first, one.end, one.total, one.steps) for one in schedules] == [
        (0, 1, 3, 6),
        (1, 2, 3, 6),
        (2, 3, 3, 6),
    ]


def test_samples_that_judge_are_in_no_wave_and_the_others_stay_in_theirs() -> None:
    split = hold_out([range(10), range(10, 100)], dict.fromkeys(range(100), 9), 0, {2, 3, 5})
    assert split.validation == (2, 3, 5)
    assert split.waves == ((0, 1, 4, *range(6, 10)), tuple(range(10, 100)))


def test_waves_in_which_nothing_judges_are_refused() -> None:
    with pytest.raises(MissingInput, match="of 10 samples with a token to learn from 0 judge and 10 train"):
        hold_out([[0], list(range(1, 10))], dict.fromkeys(range(10), 9), 1, {11})


@pytest.mark.parametrize(
    ("size", "accumulation", "told"), [(9, 4, None), (15, 4, None), (16, 4, 64), (30, 2, None), (31, 2, 62)]
)
def test_steps_of_other_sizes_than_the_recipe_says_are_told_with_their_rows(
    size: int, accumulation: int, told: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    split = _split([[size] * 24, [size] * 24])
    one = plan(None, accumulation=accumulation)  # type: ignore[arg-type]
    make_schedule(one, split, lambda _: True)
    found = [message for message in caplog.messages if "rows in the mean" in message]
    assert len(found) == (told is not None)
    for message in found:
        assert f"{told} rows in the mean, expected about training.tokens_per_step = 40" in message


def test_few_samples_for_a_step_are_told(caplog: pytest.LogCaptureFixture) -> None:
    make_schedule(plan(None), _split([[4, 5, 6]]), lambda _: True)  # type: ignore[arg-type]
    assert "a step has 15 rows in the mean" in caplog.text
