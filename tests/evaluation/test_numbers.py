from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.evaluation.acceptance import AcceptanceCounts
from eagle3_pipeline.evaluation.grid import Cell
from eagle3_pipeline.evaluation.measurement import Measurement
from eagle3_pipeline.evaluation.numbers import summarise
from eagle3_pipeline.evaluation.phase import Measured
from eagle3_pipeline.recipe.evaluation import Evaluation

HEADLINE = Cell(3, 0.0, 1)
Repeat = dict[str, Measurement]


def settings(**changes: Any) -> Evaluation:
    return Evaluation.model_validate({"sets": [{"name": "a", "path": "a.jsonl"}]} | changes)


def measurement(
    tokens: int, seconds: float, *, drafts: int = 0, refused: tuple[str, ...] = (), sampled: bool = False
) -> Measurement:
    counts = AcceptanceCounts(drafts, 3 * drafts, drafts, (drafts, 0, 0)) if drafts else None
    replies = {} if sampled else {"p": tuple(range(tokens))}
    return Measurement(replies, {}, 1, refused, tokens, seconds, 2 * seconds, counts)


def repeats(speeds: Sequence[float], *, drafts: int = 0) -> list[Repeat]:
    return [{"a": measurement(10, 10 / speed, drafts=drafts)} for speed in speeds]


def of_headline(with_draft: list[Repeat], without: list[Repeat]) -> dict[str, Any]:
    return summarise(settings(), {HEADLINE.alone: without}, {HEADLINE: with_draft})


def test_the_total_is_pooled_and_not_a_mean_of_the_sets() -> None:
    without = {"a": measurement(10, 1.0), "b": measurement(90, 3.0)}
    with_draft = {"a": measurement(10, 0.5, drafts=5), "b": measurement(90, 1.5, drafts=45)}
    report = of_headline([with_draft], [without])
    assert report["drafts"] == 50
    assert report["tokens_per_second_without"] == 25.0
    assert report["tokens_per_second_with"] == 50.0
    assert report["seconds_per_output_token_with"] == 0.04
    assert report["speedup"] == report["speedup_least"] == report["speedup_most"] == 2.0
    assert report["sets"]["a"]["tokens_per_second_without"] == 10.0
    assert report["prompts"] == 2


def test_speeds_are_medians_of_the_repeats_and_the_spread_is_that_of_their_pairs_in_order() -> None:
    report = of_headline(repeats([10, 30, 20], drafts=4), repeats([10, 10, 20]))
    assert report["repeats"] == 3
    assert report["tokens_per_second_with"] == pytest.approx(20)
    assert report["tokens_per_second_without"] == pytest.approx(10)
    spread = [report[name] for name in ("speedup", "speedup_least", "speedup_most")]
    assert spread == pytest.approx([2.0, 1.0, 3.0])


def test_what_is_counted_is_summed_over_the_repeats_and_prompts_are_not() -> None:
    report = of_headline(repeats([10, 20], drafts=4), repeats([10, 10]))
    assert (report["drafts"], report["output_tokens_with"], report["output_tokens_without"]) == (8, 20, 20)
    assert report["wall_seconds_with"] == pytest.approx(1.5)
    assert report["prompts"] == 1


def test_a_cell_that_is_measured_once_is_held_against_the_median_of_the_target_and_has_no_spread() -> None:
    evaluation = settings(grid={"speculative_tokens": [5]})
    other = Cell(5, 0.0, 1)
    with_draft = {HEADLINE: repeats([10, 10, 10], drafts=4), other: repeats([20], drafts=4)}
    report = summarise(evaluation, {HEADLINE.alone: repeats([10, 8, 5])}, with_draft)
    first, second = report["grid"]
    assert (first["speculative_tokens"], second["speculative_tokens"]) == (3, 5)
    found = [second[name] for name in ("speedup", "speedup_least", "speedup_most")]
    assert found == pytest.approx([2.5, 2.5, 2.5])
    assert second["repeats"] == 1


def test_the_headline_is_the_first_cell_and_the_top_of_the_report() -> None:
    report = of_headline(repeats([10], drafts=4), repeats([10]))
    (first,) = report["grid"]
    assert first == {name: report[name] for name in first}
    assert (report["speculative_tokens"], report["temperature"], report["in_flight"]) == (3, 0.0, 1)
    assert report["base"] is None


def test_the_base_draft_is_held_against_the_same_runs_of_the_target() -> None:
    base: Measured = {HEADLINE: repeats([5], drafts=2)}
    without: Measured = {HEADLINE.alone: repeats([10])}
    report = summarise(settings(), without, {HEADLINE: repeats([20], drafts=4)}, base)
    assert report["speedup"] == pytest.approx(2.0)
    assert report["base"]["speedup"] == pytest.approx(0.5)
    assert report["base"]["drafts"] == report["base"]["sets"]["a"]["drafts"] == 2


def test_speeds_over_other_prompts_are_not_compared_whichever_repeat_refused_them() -> None:
    refusing = [*repeats([10], drafts=4), {"a": measurement(10, 1.0, drafts=5, refused=("q",))}]
    with pytest.raises(QualityError, match="not comparable"):
        of_headline(refusing, repeats([10, 10]))


def test_replies_are_compared_once_and_sampled_ones_never() -> None:
    part = measurement(11, 1.0, drafts=5)
    assert of_headline([{"a": part}], repeats([10]))["identical_share"] == 0.0
    assert of_headline(repeats([10], drafts=4), repeats([10]))["identical_share"] == 1.0
    sampled = [{"a": measurement(10, 1.0, drafts=drafts, sampled=True)} for drafts in (4, 0)]
    assert of_headline(sampled[:1], sampled[1:])["identical_share"] is None


def test_a_draft_without_drafts_has_no_acceptance_length_of_one() -> None:
    with pytest.raises(QualityError, match="counted 0 drafts"):
        of_headline(repeats([10]), repeats([10]))


SPEEDS = st.floats(0.1, 1000)


@given(
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(*(st.lists(SPEEDS, min_size=n, max_size=n) for _ in range(2)))
    )
    | st.tuples(st.lists(SPEEDS, min_size=1, max_size=1), st.lists(SPEEDS, min_size=2, max_size=4))
)
def test_c59_the_speed_up_is_within_its_spread_and_the_length_is_one_plus_its_positions(
    speeds: tuple[list[float], list[float]],
) -> None:
    report = of_headline(repeats(speeds[0], drafts=7), repeats(speeds[1]))
    assert report["speedup_least"] <= report["speedup"] * (1 + 1e-9)
    assert report["speedup"] <= report["speedup_most"] * (1 + 1e-9)
    assert report["acceptance_length"] == pytest.approx(1 + sum(report["acceptance_by_position"]))
    assert report["acceptance_length"] == pytest.approx(1 + report["accepted_tokens"] / report["drafts"])
