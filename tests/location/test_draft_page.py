"""The page of a draft and of a release in Dagster: which prompts, target, servers, shards and code."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from assets import draft_checkpoint, released_draft, target_model, vocabulary_map
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.made_from import draft_made_from, release_made_from
from eagle3_pipeline.recipe import load_recipe
from resources import GpuPartitions, Storage, VllmServers
from tests.location.test_metadata import TRAINED
from tests.recipes import tiny_recipe
from tests.release.finished import finished
from tests.release.made import made_lineage

JUDGED = {
    "accuracy_by_position": [0.4, 0.3],
    "chance": 0.06,
    "best_step": 8,
    "simulated_acceptance_length": 1.6,
}


def _materialized(module: Any, lineage: Lineage, **resources: Any) -> dg.AssetMaterialization:
    """The event of an asset that is made already."""
    storage = Storage(root=str(lineage.storage_root))
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize(
            [module.build(lineage.recipe)], resources={"storage": storage, **resources}, instance=instance
        )
    (event,) = result.get_asset_materialization_events()
    return event.materialization


def _rows(event: dg.AssetMaterialization) -> list[dict[str, Any]]:
    shown = event.metadata["made_from"]
    assert isinstance(shown, dg.TableMetadataValue)
    return [dict(record.data) for record in shown.records]


def test_a_draft_shows_what_it_was_made_from(tmp_path: Path) -> None:
    lineage = made_lineage(tmp_path)
    place = lineage.draft_checkpoint()
    place.folder.mkdir(parents=True)
    place.finish([], {**TRAINED, **JUDGED})
    rows = _rows(_materialized(draft_checkpoint, lineage, gpus=GpuPartitions()))
    assert rows == draft_made_from(lineage)
    assert [row["thing"] for row in rows] == [
        "target",
        "prompts",
        "generation server",
        "samples",
        "extraction server",
        "hidden states",
        "vocabulary",
    ]


def test_a_release_shows_its_draft_and_its_report_too(tmp_path: Path) -> None:
    lineage = finished(tmp_path)
    rows = _rows(_materialized(released_draft, lineage, servers=VllmServers()))
    assert rows == release_made_from(lineage)
    assert [row["thing"] for row in rows[-2:]] == ["draft", "report"]


def test_the_version_of_a_vocabulary_is_that_of_its_tokens_whatever_is_speculated(tmp_path: Path) -> None:
    versions, fingerprints = set(), set()
    for tokens in (3, 2):
        evaluation = made_lineage(tmp_path).recipe.evaluation.model_dump(mode="json")
        lineage = made_lineage(tmp_path, evaluation={**evaluation, "speculative_tokens": tokens})
        event = _materialized(vocabulary_map, lineage)
        assert event.tags is not None
        versions.add(event.tags["dagster/data_version"])
        fingerprints.add(lineage.vocabulary_map().fingerprint)
    assert len(fingerprints) == 2
    assert len(versions) == 1


@pytest.mark.parametrize("trusted", [False, True])
def test_a_target_shows_whether_its_own_code_runs(tmp_path: Path, tiny_llama: Path, trusted: bool) -> None:
    path = tiny_recipe(tmp_path, tiny_llama, fake=True, target={"trust_remote_code": trusted})
    lineage = Lineage(load_recipe(str(path), tmp_path), tmp_path / "storage")
    event = _materialized(target_model, lineage)
    assert event.metadata["trust_remote_code"] == dg.MetadataValue.bool(trusted)
