"""The plan of bytes and the extraction agree on what of a sample is extracted."""

from pathlib import Path

import pytest

from eagle3_pipeline.extraction.extraction import extract_shards
from eagle3_pipeline.room import expected_plan, known_lengths
from eagle3_pipeline.samples.extracted_form import layout_of, longest_sample
from tests.extraction.build import StandIn, audit, make_lineage


@pytest.mark.parametrize(
    ("max_context", "max_model_len", "longest"),
    [(2048, 64, 63), (2048, 65, 64), (32, None, 31), (2048, None, 64), (None, None, 64)],
)
def test_samples_are_cut_to_what_server_and_target_can_read(
    max_context: int | None, max_model_len: int | None, longest: int, tmp_path: Path
) -> None:
    lineage = make_lineage(
        tmp_path, facts={"max_context": max_context}, server={"max_model_len": max_model_len}
    )
    assert longest_sample(lineage) == longest


def test_the_plan_counts_the_tokens_that_are_extracted(tmp_path: Path) -> None:
    lineage = audit(make_lineage(tmp_path, facts={"max_context": 12}, server={"max_model_len": None}))
    plan = expected_plan(lineage, known_lengths(lineage), [])
    opener = StandIn().open(lineage.staging)
    made = extract_shards(lineage, lineage.recipe.shards, opener, lambda shard, manifest: None)
    assert plan.tokens == sum(one.facts["tokens"] for one in made)
    assert plan.layout == layout_of(lineage)
