import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.errors import Busy, MissingInput, QualityError, ServerDied
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.release.smoke import smoke, standard_errors_apart
from tests.evaluation.counting_server import counting_server
from tests.release.made import REPORT, made_lineage, make_checkpoint, make_report

# What the counting server accepts: 3, 1, 0, 2 of three tokens, over and over.
SERVED = [0.75, 0.5, 0.25]
LONGEST = 600
"""Tokens of a reply: 720 drafts for three of them."""


def reported(root: Path, by_position: list[float], **evaluation: Any) -> Lineage:
    """A lineage whose report says that so much of 3,000 drafts was accepted, in three repeats."""
    held_out = {"name": "everyday", "path": str(root / "recipe" / "held-out.jsonl"), "column": "prompt"}
    values = {"sets": [held_out], "max_completion_tokens": LONGEST, **evaluation}
    lineage = made_lineage(root, evaluation=values)
    make_checkpoint(lineage, weights=False)
    numbers = REPORT["sets"]["everyday"] | {
        "acceptance_by_position": by_position,
        "acceptance_length": 1 + sum(by_position),
        "drafts": 3000,
        "repeats": 3,
    }
    make_report(lineage, sets={"everyday": numbers})
    return lineage


def run(lineage: Lineage, **knobs: Any) -> dict[str, Any]:
    with counting_server(**knobs) as server:
        return smoke(lineage, server)  # type: ignore[arg-type]


def test_a_folder_that_serves_as_the_report_says_passes_with_both_numbers(tmp_path: Path) -> None:
    found = run(reported(tmp_path, SERVED))
    assert (found["set"], found["prompts"]) == ("everyday", 3)
    assert found["acceptance_length"] == pytest.approx(1 + sum(found["acceptance_by_position"]))
    assert (found["reported_length"], found["reported_by_position"]) == (2.5, SERVED)
    # Ten drafts count as one, and one repeat of the report.
    apart = [
        standard_errors_apart(now, found["drafts"] / 10, then, 100)
        for now, then in zip(found["acceptance_by_position"], SERVED, strict=True)
    ]
    assert found["standard_errors"] == pytest.approx(max(apart))
    assert found["standard_errors"] < 0.5


@pytest.mark.parametrize("by_position", [[0.02, 0.0, 0.0], [1.0, 0.5, 0.25], [0.75, 0.5, 0.0]])
def test_c56_a_healthy_server_with_another_acceptance_at_any_position_is_refused(
    tmp_path: Path, by_position: list[float]
) -> None:
    lineage = reported(tmp_path, by_position)
    with pytest.raises(QualityError, match="another acceptance than the report's") as refusal:
        run(lineage)
    said = ", ".join(f"{share:.3f}" for share in by_position)
    assert f"{said} in the report" in str(refusal.value)
    assert "server.log" in str(refusal.value)
    assert str(lineage.acceptance_report().folder) in str(refusal.value)


def test_the_first_set_is_asked_once_with_the_settings_of_the_headline(tmp_path: Path) -> None:
    lineage = reported(tmp_path, SERVED, concurrency=2, repeats=4, grid={"concurrency": [8]})
    with counting_server(delay_s=0.02) as server:
        smoke(lineage, server)  # type: ignore[arg-type]
    assert server.most_in_flight == 2
    bodies = [body for body in server.requests if body["max_tokens"] == LONGEST]  # a warm-up has fewer
    assert sorted(body["messages"][-1]["content"] for body in bodies) == [
        "Name three rivers.",
        "Where do swallows sleep?",
        "Why is bread chewy?",
    ]
    assert {(body["model"], body["temperature"]) for body in bodies} == {(server.model, 0.0)}


def test_a_prompt_that_stands_twice_in_the_set_is_asked_once(tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text('{"prompt": "Why is bread chewy?"}\n' * 2)
    twice = {"name": "everyday", "path": str(path), "column": "prompt"}
    assert run(reported(tmp_path, SERVED, sets=[twice]))["prompts"] == 1


def test_a_server_that_never_speculates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QualityError, match="counted 0 drafts"):
        run(reported(tmp_path, SERVED), drafts=False)


def test_a_server_of_another_number_of_speculative_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QualityError, match="counted 2 positions"):
        run(reported(tmp_path, SERVED), speculative_tokens=2)


def test_another_user_of_the_server_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(Busy, match="with the released draft"):
        run(reported(tmp_path, SERVED), foreign_tokens=40)


def test_a_server_that_dies_over_the_folder_is_told_as_that(tmp_path: Path) -> None:
    with pytest.raises(ServerDied):
        run(reported(tmp_path, SERVED), hang_up=True, dead=True)


def test_without_a_report_nothing_is_asked(tmp_path: Path) -> None:
    lineage = made_lineage(tmp_path)
    make_checkpoint(lineage, weights=False)
    with counting_server() as server:
        with pytest.raises(MissingInput, match="acceptance_report"):
            smoke(lineage, server)  # type: ignore[arg-type]
        assert server.requests == []


COUNTS = st.integers(1, 10**6).flatmap(lambda drafts: st.tuples(st.integers(0, drafts), st.just(drafts)))


@given(one=COUNTS, other=COUNTS)
def test_the_distance_of_two_shares_is_finite_and_has_no_direction(
    one: tuple[int, int], other: tuple[int, int]
) -> None:
    (accepted, drafts), (other_accepted, other_drafts) = one, other
    shares = (accepted / drafts, drafts, other_accepted / other_drafts, other_drafts)
    apart = standard_errors_apart(*shares)
    assert math.isfinite(apart)
    assert apart == pytest.approx(standard_errors_apart(*shares[2:], *shares[:2]))
    assert (apart > 0) == (shares[0] != shares[2])


def refused(share: float, other: float, drafts: int) -> float:
    """The probability that samples of so many independent drafts are three errors apart, exactly."""

    def chances(p: float) -> list[float]:
        return [math.comb(drafts, k) * p**k * (1 - p) ** (drafts - k) for k in range(drafts + 1)]

    return sum(
        chance * chance_other
        for k, chance in enumerate(chances(share))
        for n, chance_other in enumerate(chances(other))
        if standard_errors_apart(k / drafts, drafts, n / drafts, drafts) > 3
    )


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7])
def test_two_samples_of_the_same_draft_are_hardly_ever_refused(share: float) -> None:
    assert refused(share, share, 100) < 0.004


def test_an_acceptance_that_is_gone_over_a_thousand_drafts_is_refused() -> None:
    assert refused(0.25, 0.01, 100) > 0.99
    assert standard_errors_apart(0.25, 100, 0.09, 100) > 3
