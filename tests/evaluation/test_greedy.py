import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.evaluation import greedy
from eagle3_pipeline.evaluation.greedy import FLOOR, MARGIN, UNLIKELY, greedy_agreement, other_batch_size
from tests.evaluation.counting_server import CountingServer, counting_server

PLAIN, OTHER, DRAFTED = (7, 1, 7, 7), (7, 2, 8, 8), (7, 3, 9, 9)
"""A reply, and two that part from it at the second token."""


def tied(gap: float, *, drafted: float | None = None) -> Callable[[list[int]], dict[int, float]]:
    """The tokens of PLAIN and OTHER so far apart, and that of DRAFTED."""
    behind = gap if drafted is None else drafted
    return lambda prompt: dict(
        sorted({1: -0.5, 2: -0.5 - gap, 3: -0.5 - behind, 4: -9.0}.items(), key=lambda one: -one[1])
    )


def replies(differing: Sequence[int], reply: Sequence[int], count: int = 20) -> dict[str, Sequence[int]]:
    """So many replies, of which those with the numbers `differing` are `reply`."""
    return {f"p{number}": reply if number in differing else PLAIN for number in range(count)}


def compare(
    server: CountingServer, other: Sequence[int] = (), drafted: Sequence[int] = (), count: int = 20
) -> dict[str, Any]:
    """The facts where the replies of these numbers differ."""
    return greedy_agreement(
        server,  # type: ignore[arg-type]
        {f"p{number}": (1000 + number,) for number in range(count)},
        plain=replies((), PLAIN, count),
        other_batch=replies(other, OTHER, count),
        with_draft=replies(drafted, DRAFTED, count),
        request_timeout_s=5,
    )


def test_equal_replies_agree_and_nothing_is_asked() -> None:
    with counting_server() as server:
        facts = compare(server)
    assert server.requests == []
    assert facts == {
        "compared": 20,
        "differ_with_draft": 0,
        "differ_plain": 0,
        "asked": 0,
        "bound": FLOOR,
        "largest_gap": 0.0,
        "largest_gap_plain": 0.0,
        "passed": True,
    }


def test_replies_that_part_at_near_ties_as_often_as_plain_ones_agree() -> None:
    with counting_server(likeliest=tied(0.03, drafted=0.05)) as server:
        facts = compare(server, other=range(6), drafted=range(4, 12))
    assert facts == {
        "compared": 20,
        "differ_with_draft": 8,
        "differ_plain": 6,
        "asked": 12,
        "bound": FLOOR,
        "largest_gap": pytest.approx(0.05),
        "largest_gap_plain": pytest.approx(0.03),
        "passed": True,
    }


def test_a_clear_choice_of_the_target_that_is_another_with_the_draft_fails_and_all_is_told() -> None:
    with (
        counting_server(likeliest=tied(0.03, drafted=2.5)) as server,
        pytest.raises(QualityError) as raised,
    ):
        compare(server, other=[0], drafted=[3])
    said = str(raised.value)
    for words in ("prompt p3", "token 2", "'t1' (id 1) without", "'t3' (id 3) with", "2.500 apart"):
        assert words in said
    assert f"bound is {FLOOR:.3f}" in said
    assert "at 1 of 1 places" in said
    for words in ("the draft changes answers", "another version", "different targets", "server.log"):
        assert words in said
    assert "penalty" in said


def test_a_token_that_is_not_among_the_likeliest_is_no_near_tie() -> None:
    with (
        counting_server(likeliest=lambda prompt: {1: -0.1, 2: -0.2, 5: -4.0}) as server,
        pytest.raises(QualityError, match=r"3\.900 apart"),
    ):
        compare(server, drafted=[3])


@pytest.mark.parametrize(("gap", "passes"), [(1.4, True), (1.6, False)])
def test_the_bound_is_taken_from_the_plain_runs(gap: float, passes: bool) -> None:
    with counting_server(likeliest=tied(0.75, drafted=gap)) as server:
        if passes:
            facts = compare(server, other=[0], drafted=[3])
            assert facts["bound"] == pytest.approx(MARGIN * 0.75)
        else:
            with pytest.raises(QualityError, match=r"the bound is 1\.500"):
                compare(server, other=[0], drafted=[3])


def test_what_the_plain_runs_do_alike_is_asked_once_and_held_against_nobody() -> None:
    with counting_server(likeliest=tied(3.0)) as server:
        facts = greedy_agreement(
            server,  # type: ignore[arg-type]
            {"a": (1,)},
            plain={"a": PLAIN},
            other_batch={"a": OTHER},
            with_draft={"a": OTHER},
            request_timeout_s=5,
        )
        assert len(server.requests) == facts["asked"] == 1
    assert facts["largest_gap"] == facts["largest_gap_plain"] == 3.0


@pytest.mark.parametrize(("more", "passes"), [(9, True), (10, False)])
def test_near_ties_that_are_more_frequent_with_the_draft_fail(more: int, passes: bool) -> None:
    with counting_server(likeliest=tied(0.03)) as server:
        if passes:
            assert compare(server, drafted=range(more))["differ_with_draft"] == more
        else:
            with pytest.raises(QualityError) as raised:
                compare(server, drafted=range(more))
            for words in ("10 of 20 differ with the draft", "only 0 between", "0.00098", "changes answers"):
                assert words in str(raised.value)


def test_fewer_differences_with_the_draft_are_no_failure() -> None:
    with counting_server(likeliest=tied(0.03)) as server:
        assert compare(server, other=range(20))["differ_plain"] == 20


@pytest.mark.parametrize(("more", "fewer"), list(itertools.product(range(5), repeat=2)))
def test_the_chance_is_the_share_of_all_ways_that_coins_can_fall(more: int, fewer: int) -> None:
    ways = list(itertools.product((0, 1), repeat=more + fewer))
    assert greedy._chance(more, fewer) == sum(sum(way) >= more for way in ways) / len(ways)


def test_equal_rates_hardly_ever_fail_and_twice_the_rate_does() -> None:
    chance = random.Random(0)

    def share_that_fails(rate: float) -> float:
        """Of 1000 comparisons of 400 prompts; a plain run differs in 30 % of them."""
        failed = 0
        for _ in range(1000):
            pairs = [(chance.random() < rate, chance.random() < 0.3) for _ in range(400)]
            more, fewer = (sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs))
            failed += greedy._chance(more, fewer) < UNLIKELY
        return failed / 1000

    assert share_that_fails(0.3) < 0.005
    assert share_that_fails(0.6) > 0.999


def test_however_many_replies_differ_a_bounded_number_of_places_of_all_parts_is_asked() -> None:
    with counting_server(likeliest=tied(0.03)) as server:
        facts = compare(server, other=range(500), drafted=range(500), count=500)
    assert facts["differ_with_draft"] == facts["differ_plain"] == 500
    assert facts["asked"] == len(server.requests) <= 128
    numbers = {body["prompt"][0] - 1000 for body in server.requests}
    assert all(numbers & set(range(first, first + 50)) for first in range(0, 500, 50))


def test_a_prompt_that_one_run_lacks_is_left_out() -> None:
    full, less = {"a": PLAIN, "b": PLAIN}, {"a": PLAIN}
    with counting_server() as server:
        for lacking in ("plain", "other_batch", "with_draft"):
            runs = {"plain": full, "other_batch": full, "with_draft": full} | {lacking: less}
            facts = greedy_agreement(
                server,  # type: ignore[arg-type]
                {"a": (1,), "b": (2,)},
                **runs,
                request_timeout_s=5,
            )
            assert facts["compared"] == 1
        with pytest.raises(QualityError, match="no prompt was answered"):
            greedy_agreement(
                server,  # type: ignore[arg-type]
                {},
                plain=full,
                other_batch=full,
                with_draft=full,
                request_timeout_s=5,
            )


def test_the_second_plain_run_has_as_many_rows_in_a_step_as_the_check_of_drafts() -> None:
    assert other_batch_size(in_flight=2, speculative_tokens=3) == 8
