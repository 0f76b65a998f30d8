"""What Dagster shows of the draft's vocabulary."""

from typing import Any

import dagster as dg

from assets.vocabulary_map import _pictures
from eagle3_pipeline.manifest import Manifest


def _manifest(**facts: Any) -> Manifest:
    return Manifest("vocabulary_map", "f" * 64, (), facts=facts)


def test_each_size_is_a_row_of_a_table_and_a_point_of_a_picture() -> None:
    rows = [
        {"draft_tokens": 512, "coverage": 0.8, "best_acceptance_length": 2.5},
        {"draft_tokens": 4096, "coverage": 0.96, "best_acceptance_length": 3.6},
    ]
    shown = _pictures(_manifest(sizes=rows, speculative_tokens=3))
    assert isinstance(shown["sizes"], dg.TableMetadataValue)
    assert [dict(record.data) for record in shown["sizes"].records] == rows
    assert shown["size_plot"].value.startswith("![best acceptance length by size](data:image/png;base64,")


def test_without_held_out_replies_there_is_no_picture() -> None:
    assert _pictures(_manifest()) == {}
