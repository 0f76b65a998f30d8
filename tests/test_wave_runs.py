"""Which run comes next: what lies on the disk says it."""

from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.samples.audit import audit_samples
from eagle3_pipeline.wave_runs import next_run
from eagle3_pipeline.waves import finish_turn, turns
from tests.generation.world import make_lineage
from tests.samples.test_audit import make_samples


def finish(place: Place, facts: dict[str, Any] | None = None) -> Manifest:
    place.folder.mkdir(parents=True, exist_ok=True)
    return place.finish([], facts or {})


@pytest.fixture
def lineage(tmp_path: Path) -> Lineage:
    """Five shards in two waves, of which only target and prompts are made."""
    extraction = {"layers": [1, 2, 3, 4], "waves": 2}
    return make_lineage(tmp_path, [1] * 50, 10, extraction=extraction)


def plan(lineage: Lineage) -> None:
    for shard in lineage.recipe.shards:
        make_samples(lineage, shard, ["good"] * 10)
    audit_samples(lineage)
    finish(lineage.vocabulary_map())


def end_turn(lineage: Lineage, number: int) -> None:
    turn = turns(lineage)[number]
    consumed = {shard: finish(lineage.hidden_state_shards(shard)).digest for shard in turn.shards}
    lineage.draft_checkpoint().folder.mkdir(parents=True, exist_ok=True)
    finish_turn(lineage, turn, "checkpoint", consumed, {})


def test_samples_come_first_until_the_plan_and_the_vocabulary_are_made(lineage: Lineage) -> None:
    first = next_run(lineage)
    assert first is not None
    assert first.job == "small_samples"
    assert first.partitions == ("small-p10-s000", "small-p10-s004")
    for shard in lineage.recipe.shards:
        make_samples(lineage, shard, ["good"] * 10)
    audit_samples(lineage)
    assert next_run(lineage) == first  # the vocabulary is still missing


def test_then_each_wave_once_with_its_range_of_partitions_then_the_release(lineage: Lineage) -> None:
    plan(lineage)
    found = []
    for number in range(2):
        found.append(next_run(lineage))
        assert next_run(lineage) == found[-1]
        end_turn(lineage, number)
    first, second = found
    assert first is not None
    assert second is not None
    assert (first.job, first.what) == ("small_wave", "wave 1 of 2, p10-s000 to p10-s002")
    assert first.partitions == ("small-p10-s000", "small-p10-s002")
    assert second.what == "wave 2 of 2, p10-s003 to p10-s004"
    assert second.tags == {
        "dagster/asset_partition_range_start": "small-p10-s003",
        "dagster/asset_partition_range_end": "small-p10-s004",
        "eagle3/wave_run": second.key,
    }
    assert first.key != second.key

    finish(lineage.draft_checkpoint())
    release = next_run(lineage)
    assert release is not None
    assert release.job == "small_release"
    finish(lineage.acceptance_report())
    finish(lineage.released_draft())
    assert next_run(lineage) is None


def test_another_setting_makes_another_key(lineage: Lineage) -> None:
    plan(lineage)
    training = lineage.recipe.training.model_copy(update={"learning_rate": 1e-4})
    changed = Lineage(lineage.recipe.model_copy(update={"training": training}), lineage.storage_root)
    ours, theirs = next_run(lineage), next_run(changed)
    assert ours is not None
    assert theirs is not None
    assert (ours.partitions, ours.what) == (theirs.partitions, theirs.what)
    assert ours.key != theirs.key


def test_a_set_that_fits_at_once_is_one_wave_over_all_shards(tmp_path: Path) -> None:
    extraction = {"layers": [1, 2, 3, 4], "waves": "auto"}
    lineage = make_lineage(tmp_path, [1] * 20, 10, extraction=extraction)
    plan(lineage)
    wave = next_run(lineage)
    assert wave is not None
    assert (wave.job, wave.partitions) == ("small_wave", ("small-p10-s000", "small-p10-s001"))
    for shard in lineage.recipe.shards:
        finish(lineage.hidden_state_shards(shard))
    assert next_run(lineage) == wave  # the draft is still missing
    finish(lineage.draft_checkpoint())
    release = next_run(lineage)
    assert release is not None
    assert release.job == "small_release"
