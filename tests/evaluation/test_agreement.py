import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.evaluation.acceptance import AcceptanceCounts
from eagle3_pipeline.evaluation.agreement import TOLERANCE, compare, explanation, rows_of_comparison
from eagle3_pipeline.evaluation.replay import Replay
from eagle3_pipeline.recipe.evaluation import Evaluation


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


def conversations(
    tokens: int, right: float, *, proposed: int = 3, replies: int = 2000
) -> tuple[list[float], Replay]:
    """Replies of so many tokens, walked and served: the walk's acceptance by position, and the replay.

    A proposal is right with the chance `right`, where the ones before it are.
    """
    chance = random.Random(0)
    drafts, counted, walked = 0, [0] * proposed, [0] * proposed
    for _ in range(replies):
        left = tokens - 1  # the first comes from the prompt
        while left > 0:
            accepted = next((k for k in range(proposed) if chance.random() >= right), proposed)
            drafts += 1
            for position in range(accepted):
                counted[position] += 1  # vLLM counts, and then cuts the step off
                walked[position] += position < left
            left -= accepted + 1
    acceptance = AcceptanceCounts(drafts, proposed * drafts, sum(counted), tuple(counted))
    replay = Replay(served=replies, refused=0, same=replies, tokens=tokens * replies, acceptance=acceptance)
    return [count / drafts for count in walked], replay


@pytest.mark.parametrize("tokens", [8, 16, 64])
def test_the_same_draft_agrees_however_short_the_replies_and_a_worse_one_does_not(tokens: int) -> None:
    shares, same = conversations(tokens, 0.7)
    found = compare(same, trained(*shares), settings())
    assert found["simulation_agrees"] is True
    assert found["simulation"]["served_at_least"] < 1 + sum(shares) < found["simulation"]["served_length"]
    _, worse = conversations(tokens, 0.9 * 0.7)
    assert compare(worse, trained(*shares), settings())["simulation_agrees"] is False
    _, better = conversations(tokens, 0.9)
    assert compare(better, trained(*shares), settings())["simulation_agrees"] is False


def test_both_ends_of_what_is_served_are_told() -> None:
    shares, same = conversations(8, 0.7)
    found = compare(same, trained(*shares), settings())
    numbers = found["simulation"]
    ends = f"{numbers['served_at_least']:.3f} to {numbers['served_length']:.3f}"
    assert rows_of_comparison(found)[1]["length"] == ends
    assert f"{ends} served" in explanation(found)
    assert f"Up to {numbers['behind_the_end']} of the tokens" in explanation(found)


def test_fewer_served_tokens_are_compared_with_the_simulation_of_that_number() -> None:
    lengths = {"simulated_acceptance_by_tokens": [1.5, 1.7, 1.9]}  # not the sums of the first positions
    facts = trained(0.5, 0.3, 0.1, **lengths)
    found = compare(served(45, 25), facts, settings(speculative_tokens=2))
    assert found["simulation_agrees"] is True
    assert found["simulation_ratio"] == pytest.approx(1)
    assert found["simulated_acceptance_length"] == 1.9
    assert "proposes 2 tokens a draft, training 3: compared with the simulation of 2" in explanation(found)
    assert rows_of_comparison(found)[0] == {
        "acceptance": "simulated",
        "length": "1.700",
        "pos 1": "-",
        "pos 2": "-",
    }
    assert compare(served(50, 30), facts, settings(speculative_tokens=2))["simulation_agrees"] is False


def test_more_served_tokens_than_were_simulated_are_not_compared_and_it_says_why() -> None:
    found = compare(served(50, 30, 20), trained(0.5, 0.3), settings(speculative_tokens=3))
    assert found["simulation_agrees"] is found["simulation_ratio"] is None
    assert rows_of_comparison(found) == []
    said = explanation(found)
    assert "proposes 3 tokens a draft, training simulated at most 2" in said
    assert "length is 2.000" in said
    assert "training.test_time_steps to 3" in said
    assert "refused" not in said


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


def test_tokens_behind_the_end_are_told_only_where_they_make_a_difference() -> None:
    whole = compare(served(50), trained(0.5), settings(speculative_tokens=1))
    assert "behind the end" not in explanation(whole)
    assert rows_of_comparison(whole)[1]["length"] == "1.500"


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
