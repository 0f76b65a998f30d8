"""The tables for people: where a recipe stands, and what came out."""

from pathlib import Path

import pytest

from eagle3_pipeline.errors import MissingInput
from eagle3_pipeline.evaluation.report import verdict
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.summary import standing, summary
from tests.release.made import REPORT, made_lineage

_COUNTS = {"samples": 2, "good": 1, "truncated": 1, "prompt_tokens": 30, "completion_tokens": 70}


def finish(place: Place, facts: dict[str, object]) -> Manifest:
    place.folder.mkdir(parents=True, exist_ok=True)
    return place.finish([], facts)


def finished(tmp_path: Path, **report: float) -> Lineage:
    lineage = made_lineage(tmp_path)
    for shard in lineage.recipe.shards:
        finish(lineage.synthetic_samples(shard), _COUNTS)
    finish(lineage.draft_checkpoint(), {"steps": 10, "tokens": 1000, "seconds": 5.0})
    finish(lineage.acceptance_report(), REPORT | report)
    finish(lineage.released_draft(), {})
    return lineage


@pytest.mark.parametrize("speedup", [0.7, 0.98, 1.02, 1.2])
def test_the_summary_says_of_the_speed_what_the_report_says(tmp_path: Path, speedup: float) -> None:
    lineage = finished(tmp_path, speedup=speedup)
    said = summary(lineage)
    table, _, last = said.rpartition("\n\n")
    assert last.strip() == verdict(REPORT | {"speedup": speedup})
    assert "  samples            4 in 2 shards, 2 complete\n" in table
    assert "30.0 without the draft, 36.0 with it\n" in table
    assert table.endswith(str(lineage.released_draft().folder))


def test_a_summary_of_what_is_not_finished_names_what_is_missing(tmp_path: Path) -> None:
    lineage = made_lineage(tmp_path)
    for shard in lineage.recipe.shards:
        finish(lineage.synthetic_samples(shard), _COUNTS)
    with pytest.raises(MissingInput, match="draft_checkpoint is not made yet"):
        summary(lineage)


def test_the_standing_has_a_line_per_asset_and_a_base_draft_where_there_is_one(tmp_path: Path) -> None:
    lines = standing(made_lineage(tmp_path / "without")).splitlines()
    names = [line.split()[0] for line in lines]
    assert names == [
        *("target_model", "prompts", "synthetic_samples", "sample_audit", "hidden_state_shards"),
        *("vocabulary_map", "draft_checkpoint", "acceptance_report", "released_draft"),
    ]
    said = {name: line.split(maxsplit=1)[1] for name, line in zip(names, lines, strict=True)}
    assert said["synthetic_samples"].startswith("made ")
    assert said["draft_checkpoint"] == "not made yet"
    assert said["acceptance_report"] == said["released_draft"] == "waits for what is above"
    with_base = standing(made_lineage(tmp_path / "with", base_draft={"hub_id": "someone/a-draft"}))
    assert [line.split()[0] for line in with_base.splitlines()][:2] == ["target_model", "base_draft"]
