"""Evaluation sets: as they stand, in the order of the file, or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.prompts.evaluation import read_set
from eagle3_pipeline.recipe.evaluation import EvaluationSet


def _set(tmp_path: Path, rows: list[Any], **changes: Any) -> EvaluationSet:
    path = tmp_path / "held.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvaluationSet(name="held_out", path=path, **changes)


def test_a_set_is_read_in_the_order_of_the_file_duplicates_included(tmp_path: Path) -> None:
    rows = [{"turns": ["b", "then"]}, {"turns": ["a"]}, {"turns": ["a"]}]
    assert [prompt.turns for prompt in read_set(_set(tmp_path, rows))] == [("b", "then"), ("a",), ("a",)]
    (first,) = read_set(_set(tmp_path, rows, count=1))
    assert (first.turns[0], first.source) == ("b", "held_out")


def test_the_named_column_is_read(tmp_path: Path) -> None:
    (prompt,) = read_set(_set(tmp_path, [{"prompt": "no", "ask": "yes"}], column="ask"))
    assert prompt.turns == ("yes",)


@pytest.mark.parametrize(
    ("rows", "count", "message"),
    [
        ([], None, r"held\.jsonl has 0 rows, expected at least 1\. Lower its count, or add prompts\."),
        ([{"prompt": "a"}], 2, r"held\.jsonl has 1 rows, expected 2\."),
        (
            [{"prompt": "a"}, {"prompt": ""}],
            None,
            r"held\.jsonl:2 gives no prompt \(empty: user turn 1\)\. Mend or",
        ),
    ],
)
def test_a_set_that_is_not_whole_is_refused(
    tmp_path: Path, rows: list[Any], count: int | None, message: str
) -> None:
    with pytest.raises(BadInput, match=rf"evaluation set held_out: .*{message}"):
        read_set(_set(tmp_path, rows, count=count))
