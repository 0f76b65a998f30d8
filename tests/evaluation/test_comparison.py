"""Two reports beside each other: what may be compared, and what is more than chance."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.errors import BadInput, DamagedFile, MissingInput
from eagle3_pipeline.evaluation.comparison import (
    Compared,
    _length_error,
    compare_reports,
    comparison_table,
    read_report,
)
from tests.evaluation.invented import measured, numbers, report


def compared(first: dict[str, Any], second: dict[str, Any]) -> dict[tuple[str, str], Compared]:
    return {(row.where, row.number): row for row in compare_reports(first, second)}


def test_the_same_report_twice_differs_in_nothing() -> None:
    rows = compare_reports(report(), report())
    assert {row.where for row in rows} == {"gsm8k", "mt_bench", "all", "5 tokens, T 0.7, 4 in flight"}
    assert all(row.first == row.second for row in rows)
    assert not any(row.beyond for row in rows)


def test_a_difference_of_acceptance_is_told_from_chance_by_the_number_of_drafts() -> None:
    for drafts, beyond in ((30_000, True), (300, False)):
        first = report(**numbers((0.40, 0.20, 0.10), drafts=drafts))
        second = report(**numbers((0.43, 0.22, 0.11), drafts=drafts))
        rows = compared(first, second)
        assert rows["all", "acceptance length"].beyond is beyond
        assert rows["all", "position 1"].beyond is beyond


def test_repeats_of_the_same_replies_make_nothing_surer() -> None:
    once = numbers(drafts=1000, repeats=1)
    thrice = numbers(drafts=3000, repeats=3)
    assert _length_error(once) == pytest.approx(_length_error(thrice))


@given(st.lists(st.integers(0, 3), min_size=2, max_size=200))
def test_the_error_of_the_length_is_that_of_the_mean_of_accepted_tokens(accepted: list[int]) -> None:
    n = len(accepted)
    shares = tuple(sum(one >= k for one in accepted) / n for k in (1, 2, 3))
    mean = sum(accepted) / n
    variance = sum((one - mean) ** 2 for one in accepted) / n
    found = _length_error(numbers(shares, drafts=n, repeats=1))
    assert found == pytest.approx(math.sqrt(variance / n), abs=1e-7)


@pytest.mark.parametrize(
    ("first", "second", "beyond"),
    [
        ((1.10, 1.20), (1.21, 1.30), True),
        ((1.21, 1.30), (1.10, 1.20), True),
        ((1.10, 1.20), (1.15, 1.30), False),
        ((1.20, 1.20), (1.30, 1.40), None),
    ],
    ids=["apart", "apart the other way", "they meet", "measured once"],
)
def test_speed_ups_are_told_apart_by_the_ranges_of_their_repeats(
    first: tuple[float, float], second: tuple[float, float], beyond: bool | None
) -> None:
    sides = [report(speedup_least=least, speedup_most=most) for least, most in (first, second)]
    assert compared(*sides)["all", "speed-up"].beyond is beyond


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (measured(machine={**measured()["machine"], "host": "another"}), "host a-host and another"),
        (measured(machine={**measured()["machine"], "gpus": ["H200"]}), "gpus"),
        (measured(server={**measured()["server"], "settings": "4" * 12}), "settings of server.evaluation"),
    ],
    ids=["host", "gpus", "server settings"],
)
def test_speeds_of_other_machines_or_servers_are_not_compared_but_acceptance_is(
    changed: dict[str, Any], words: str
) -> None:
    other = report(measured=changed)
    kinds = {row.number for row in compare_reports(report(), other)}
    assert kinds == {"acceptance length", *(f"position {k}" for k in range(1, 6))}
    text = comparison_table(report(), other)
    assert "Speeds are not compared" in text
    assert words in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 0.7}, "evaluation.temperature is 0 in A and 0.7 in B"),
        ({"in_flight": 8}, "evaluation.concurrency is 1 in A and 8 in B"),
        ({"speculative_tokens": 5}, "evaluation.speculative_tokens is 3 in A and 5 in B"),
        ({"max_completion_tokens": 64}, "evaluation.max_completion_tokens is 128 in A and 64 in B"),
        ({"sets": {"gsm8k": numbers()}}, "the sets are gsm8k, mt_bench in A and gsm8k in B"),
        (
            {"measured": measured(sets={"gsm8k": "9" * 12, "mt_bench": "2" * 12})},
            "the set gsm8k has other prompts in A than in B",
        ),
        (
            {"sets": {"gsm8k": numbers(prompts=19), "mt_bench": numbers()}},
            "of the set gsm8k 20 prompts were answered in A and 19 in B",
        ),
        (
            {"measured": measured(target={"name": "an-owner/another", "content": "c" * 12})},
            "the target is an-owner/a-model (aaaaaaaaaaaa) in A and an-owner/another (cccccccccccc) in B",
        ),
    ],
)
def test_what_was_measured_otherwise_is_refused_with_what_differs(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput) as refused:
        compare_reports(report(), report(**changes))
    assert words in str(refused.value)
    assert "Measure both drafts with the same" in str(refused.value)


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(BadInput, match=r"(?s)temperature.*concurrency"):
        compare_reports(report(), report(temperature=0.7, in_flight=8))


def test_cells_that_only_one_report_has_are_left_out() -> None:
    one, other = report(), report()
    other["grid"] = other["grid"][:1]
    assert {row.where for row in compare_reports(one, other)} == {"gsm8k", "mt_bench", "all"}
    assert {row.where for row in compare_reports(other, one)} == {"gsm8k", "mt_bench", "all"}


def test_the_table_lines_up_and_says_whose_numbers_it_compares() -> None:
    better = report(
        **numbers((0.5, 0.3, 0.2), speedup=1.5),
        measured=measured(recipe="other", versions={"torch": "2.14.0"}),
    )
    text = comparison_table(report(), better)
    first, second, _, head, rule, *rows = text.splitlines()
    assert first.startswith("A  tiny.cpu: draft dddddddddddd for an-owner/a-model, measured 2026-01-02")
    assert second.startswith("B  other: ")
    assert len(rule) == len(head)
    (row,) = (row for row in rows if row.startswith("all: acceptance length"))
    assert row.split()[3:] == ["1.700", "2.000", "+0.300", "+17.6%", "yes"]
    (speed,) = (row for row in rows if row.startswith("all: tokens/s without"))
    assert speed.endswith(" –")
    assert "Versions differ: python 3.11.9 and none; torch 2.13.0 and 2.14.0." in text


def test_a_share_of_nothing_is_no_division_by_zero() -> None:
    nothing = report(**numbers((0.4, 0.2, 0.0)))
    row = compared(nothing, report())["all", "position 3"]
    assert row.row["in %"] == "–"
    assert row.beyond


def test_a_report_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report()))
    assert read_report(path) == report()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"sets": {}, "grid": []}'])
def test_a_file_that_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(DamagedFile, match=r"expected (a|the) report\.json"):
        read_report(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=r"no file .*gone\.json"):
        read_report(tmp_path / "gone.json")
