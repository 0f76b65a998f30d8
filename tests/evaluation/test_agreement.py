from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.evaluation.acceptance import AcceptanceCounts
from eagle3_pipeline.evaluation.agreement import TOLERANCE, compare, explanation, rows_of_comparison
from eagle3_pipeline.evaluation.replay import Replay
from eagle3_pipeline.recipe.settings import Evaluation


def settings(**changes: Any) -> Evaluation:
    return Evaluation.model_validate({"sets": [{"name": "a", "path": "a.jsonl"}]} | changes)


def trained(*shares: float, **facts: Any) -> dict[str, Any]:
    simulated = {
        "simulated_acceptance_length": 1 + sum(shares),
        "simulated_acceptance_by_position": list(shares),
    }
    return simulated | {"judges": 4} | facts


def served(*accepted: int, drafts: int = 100, **changes: Any) -> Replay:
    counts = AcceptanceCounts(drafts, len(accepted) * drafts, sum(accepted), accepted)
    tokens = 4 + drafts + sum(accepted)
    values: dict[str, Any] = {"served": 4, "refused": 0, "same": 3, "tokens": tokens, "acceptance": counts}
    return Replay(**(values | changes))


def test_equal_numbers_agree() -> None:
    found = compare(served(50, 30, 10), trained(0.5, 0.3, 0.1), settings())
    assert found["simulation_agrees"] is True
    assert found["simulation_ratio"] == pytest.approx(1)
    assert found["simulation"]["same_share"] == 0.75
    assert "They agree within 3%." in explanation(found)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5), st.floats(0.5, 1.5))
def test_they_agree_exactly_where_the_lengths_differ_by_at_most_three_per_cent(
    falling: list[int], factor: float
) -> None:
    accepted = sorted(falling, reverse=True)
    shares = [factor * count / 100 for count in accepted]
    changed = {"speculative_tokens": len(accepted)}
    found = compare(served(*accepted), trained(*shares), settings(**changed))
    ratio = (1 + sum(accepted) / 100) / (1 + sum(shares))
    assert found["simulation_ratio"] == pytest.approx(ratio)
    if abs(abs(ratio - 1) - TOLERANCE) > 1e-9:
        assert found["simulation_agrees"] is (abs(ratio - 1) < TOLERANCE)


@pytest.mark.parametrize("accepted", [(30, 10, 0), (80, 60, 50)])
def test_a_difference_in_either_direction_is_told_with_both_numbers_and_the_way_out(
    accepted: tuple[int, ...],
) -> None:
    found = compare(served(*accepted), trained(0.5, 0.3, 0.1), settings())
    assert found["simulation_agrees"] is False
    said = explanation(found)
    for words in ("1.900 simulated", f"{1 + sum(accepted) / 100:.3f} served", "100 drafts", "75% of the"):
        assert words in said
    for cause in ("dtype", "norm flags", "rope", "layer ids", "--no-enable-prefix-caching"):
        assert cause in said


@pytest.mark.parametrize(("shares", "accepted"), [((0.5, 0.3), (50, 30, 20)), ((0.5, 0.3, 0.2), (50, 30))])
def test_only_positions_that_both_sides_have_are_compared(
    shares: tuple[float, ...], accepted: tuple[int, ...]
) -> None:
    found = compare(served(*accepted), trained(*shares), settings(speculative_tokens=len(accepted)))
    assert found["simulation_agrees"] is True
    assert found["simulation"]["simulated_length"] == pytest.approx(1.8)
    assert found["simulation"]["served_by_position"] == [0.5, 0.3]
    assert found["simulated_acceptance_length"] == 1 + sum(shares)
    said = explanation(found)
    assert f"simulates {len(shares)} tokens a draft, the server proposes {len(accepted)}" in said
    assert "the first 2 positions" in said


def test_a_report_with_sampling_says_that_the_comparison_is_greedy() -> None:
    found = compare(served(50), trained(0.5), settings(temperature=0.7, speculative_tokens=1))
    assert "Both are greedy, although evaluation.temperature is 0.7" in explanation(found)
    same = compare(served(50), trained(0.5), settings(speculative_tokens=1))
    assert "greedy" not in explanation(same)


def test_conversations_that_one_side_lacks_are_told() -> None:
    found = compare(served(50, refused=2), trained(0.5, judges=5), settings(speculative_tokens=1))
    said = explanation(found)
    assert "2 more are longer than the server's context" in said
    assert "Training judged by 5: the others had no usable states." in said
    whole = compare(served(50), trained(0.5), settings(speculative_tokens=1))
    assert "Training judged" not in explanation(whole)


@pytest.mark.parametrize(("behind", "told"), [(1, False), (5, True)])
def test_tokens_behind_the_end_are_told_where_they_could_matter(behind: int, told: bool) -> None:
    replay = served(50, tokens=4 + 100 + 50 - behind)
    found = compare(replay, trained(0.5), settings(speculative_tokens=1))
    assert found["simulation"]["behind_the_end"] == behind
    assert (f"Up to {behind} of the tokens" in explanation(found)) is told


def test_nothing_served_is_neither_agreement_nor_disagreement() -> None:
    none = compare(None, trained(0.5), settings())
    refused = compare(served(1, served=0, refused=4, acceptance=None), trained(0.5), settings())
    for found in (none, refused):
        assert found["simulation_agrees"] is found["simulation_ratio"] is None
        assert rows_of_comparison(found) == []
    assert "no conversation judged" in explanation(none)
    assert "refused all 4" in explanation(refused)


def test_a_position_that_was_never_right_has_no_ratio() -> None:
    found = compare(served(50, 0), trained(0.5, 0.0), settings(speculative_tokens=2))
    assert [row["acceptance"] for row in rows_of_comparison(found)] == ["simulated", "served", "ratio"]
    assert rows_of_comparison(found)[2] == {
        "acceptance": "ratio",
        "length": "1.000",
        "pos 1": "1.000",
        "pos 2": "-",
    }
