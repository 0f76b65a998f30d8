from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.evaluation.acceptance import AcceptanceCounts
from eagle3_pipeline.serving.metrics import parse_metrics


def counts(**changes: Any) -> AcceptanceCounts:
    right = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 9, "accepted_per_position": (5, 3, 1)}
    return AcceptanceCounts(**(right | changes))


def test_the_worked_example_of_the_module() -> None:
    example = AcceptanceCounts(drafts=3, draft_tokens=9, accepted_tokens=3, accepted_per_position=(2, 1, 0))
    assert example.acceptance_length == 2.0
    assert example.acceptance_by_position == (2 / 3, 1 / 3, 0)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=50))
def test_the_acceptance_length_is_one_plus_the_sum_of_the_positions(accepted: list[int]) -> None:
    per_position = tuple(sum(n > position for n in accepted) for position in range(4))
    made = AcceptanceCounts(len(accepted), 4 * len(accepted), sum(accepted), per_position)
    assert made.acceptance_length == pytest.approx(1 + sum(made.acceptance_by_position))
    assert 1 <= made.acceptance_length <= 5


@pytest.mark.parametrize("drafts", [0, -3])
def test_no_drafts_is_an_error_and_never_an_acceptance_length_of_one(drafts: int) -> None:
    with pytest.raises(QualityError, match=f"counted {drafts} drafts"):
        counts(drafts=drafts, draft_tokens=0, accepted_tokens=0, accepted_per_position=(0, 0, 0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"accepted_per_position": (3, 1, 0)}, "sum to 4"),
        ({"accepted_per_position": (3, 5, 1)}, "rise"),
        ({"accepted_per_position": (11, 0, -2)}, "not between 0 and drafts"),
        ({"draft_tokens": 8}, "not between 0 and draft_tokens"),
    ],
)
def test_c59_counts_that_contradict_each_other_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(QualityError, match=reason):
        counts(**changes)


def metrics(drafts: tuple[int, int], accepted: tuple[int, int], positions: list[tuple[int, int]]) -> str:
    lines = []
    for engine in (0, 1):
        label = f'engine="{engine}"'
        lines.append(f"vllm:spec_decode_num_drafts_total{{{label}}} {drafts[engine]}.0")
        lines.append(f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {2 * drafts[engine]}.0")
        lines.append(f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {accepted[engine]}.0")
        for number, values in enumerate(positions):
            series = f'{{{label},position="{number}"}}'
            lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{series} {values[engine]}.0")
    return "\n".join(lines) + "\n"


def test_c59_engines_are_summed_and_the_warm_up_is_subtracted() -> None:
    before = parse_metrics(metrics((10, 0), (20, 0), [(10, 0), (10, 0)]))
    after = parse_metrics(metrics((14, 6), (22, 3), [(12, 2), (10, 1)]))
    measured = AcceptanceCounts.of(after - before)
    assert measured == AcceptanceCounts(10, 20, 5, (4, 1))
    assert measured.acceptance_length == 1.5


def test_a_pooled_draft_weighs_the_same_whatever_its_set() -> None:
    small = AcceptanceCounts(1, 3, 3, (1, 1, 1))
    assert AcceptanceCounts.sum([counts(), small]) == AcceptanceCounts(11, 33, 12, (6, 4, 2))
