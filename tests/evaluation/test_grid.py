from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.evaluation.grid import (
    Cell,
    cells,
    greedy_cell,
    of_base,
    of_draft,
    of_target,
    token_counts,
)
from eagle3_pipeline.recipe.evaluation import Evaluation

COUNTS = st.integers(1, 4)
TEMPERATURES = st.sampled_from([0.0, 0.7, 1.0])
AXES = {"speculative_tokens": COUNTS, "temperature": TEMPERATURES, "concurrency": COUNTS}
SETTINGS = st.builds(
    lambda headline, grid, repeats: settings(**headline, grid=grid, repeats=repeats),
    st.fixed_dictionaries(AXES),
    st.fixed_dictionaries({name: st.lists(values, max_size=3) for name, values in AXES.items()}),
    COUNTS,
)


def settings(**changes: Any) -> Evaluation:
    return Evaluation.model_validate({"sets": [{"name": "x", "path": "x.jsonl"}]} | changes)


def test_without_a_grid_there_is_the_headline_alone_and_a_plain_run_at_the_batch_size_of_checking() -> None:
    evaluation = settings(repeats=3)
    assert cells(evaluation) == [Cell(3, 0.0, 1)]
    assert of_draft(evaluation, 3) == of_base(evaluation) == {Cell(3, 0.0, 1): 3}
    assert of_target(evaluation) == {Cell(0, 0.0, 1): 3, Cell(0, 0.0, 4): 1}


def test_each_further_setting_is_measured_with_each_other_and_with_those_of_the_headline() -> None:
    evaluation = settings(grid={"speculative_tokens": [5], "temperature": [1.0], "concurrency": [4]})
    assert set(cells(evaluation)) == {Cell(k, t, c) for k in (3, 5) for t in (0.0, 1.0) for c in (1, 4)}
    # The plain run at the batch size of checking is one of the grid's here.
    assert of_target(evaluation) == {
        Cell(0, t, c): 1 + 2 * (t == 0 and c == 1) for t in (0, 1) for c in (1, 4)
    }


def test_replies_are_compared_at_the_first_cell_without_sampling() -> None:
    assert greedy_cell(settings(temperature=0.7)) is None
    assert greedy_cell(settings(temperature=0.7, grid={"temperature": [0]})) == Cell(3, 0.0, 1)
    sampled = of_target(settings(temperature=0.7))
    assert sampled == {Cell(0, 0.7, 1): 3}


def test_a_cell_changes_only_its_own_settings() -> None:
    evaluation = settings(max_completion_tokens=9)
    changes = {"speculative_tokens": 5, "temperature": 0.5, "concurrency": 7}
    assert Cell(5, 0.5, 7).settings(evaluation) == evaluation.model_copy(update=changes)


@given(SETTINGS)
def test_every_cell_is_measured_on_one_server_and_beside_the_target_alone(evaluation: Evaluation) -> None:
    every, headline = cells(evaluation), cells(evaluation)[0]
    assert headline == Cell(evaluation.speculative_tokens, evaluation.temperature, evaluation.concurrency)
    servers = [of_draft(evaluation, count) for count in token_counts(evaluation)]
    assert sorted(map(repr, every)) == sorted(repr(cell) for server in servers for cell in server)
    assert all(
        times == (evaluation.repeats if cell == headline else 1)
        for server in servers
        for cell, times in server.items()
    )
    alone = of_target(evaluation)
    assert {cell.alone for cell in every} <= set(alone)
    assert alone[headline.alone] == evaluation.repeats
    greedy = greedy_cell(evaluation)
    assert (greedy is None) == all(cell.temperature for cell in every)
    assert greedy is None or greedy.other_batch in alone
