"""What Dagster marks as out of date: when a setting changes, before any run; and when a shard is made again.

The assets are the recipe's own, but with bodies that make nothing but a data version.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from assets import assets_of
from assets.identity import partition_key
from assets.pipeline import pipeline_job
from eagle3_pipeline.recipe import Recipe, load_recipe
from resources import GpuPartitions, Storage, VllmServers
from tests.recipes import tiny_recipe

SHARDS = ("p8-s000", "p8-s001")
SAMPLES = {f"synthetic_samples {shard}" for shard in SHARDS}
STATES = {f"hidden_state_shards {shard}" for shard in SHARDS}
END = {"draft_checkpoint", "acceptance_report", "released_draft"}
AFTER_SAMPLES = {"sample_audit", "vocabulary_map", *STATES, *END}


def _recipe(folder: Path, **changes: Any) -> Recipe:
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    changes["prompts"] = {"count": 16, **changes.get("prompts", {})}
    return load_recipe(str(tiny_recipe(folder, model, **changes)), folder)


def _stand_in(asset: dg.AssetsDefinition, version: str) -> dg.AssetsDefinition:
    (spec,) = asset.specs
    name = spec.key.to_python_identifier()

    @dg.multi_asset(name=name, specs=[spec], backfill_policy=dg.BackfillPolicy.single_run())
    def made() -> dg.MaterializeResult:
        return dg.MaterializeResult(data_version=dg.DataVersion(version))

    return made


def _run(
    instance: dg.DagsterInstance,
    recipe: Recipe,
    version: str = "1",
    names: set[str] | None = None,
    shards: tuple[str, str] | None = None,
) -> None:
    """Materialise the named assets of a recipe, or all, over a range of shards, or over all."""
    chosen = [one for one in assets_of(recipe) if names is None or one.key.path[-1] in names]
    job = pipeline_job(recipe, chosen)
    stand_ins = [_stand_in(one, version) for one in chosen]
    tags = {
        f"dagster/asset_partition_range_{end}": partition_key(recipe, shard)
        for end, shard in zip(("start", "end"), shards or (), strict=False)
    }
    resolved = dg.Definitions(assets=stand_ins, jobs=[job]).resolve_job_def(job.name)
    assert resolved.execute_in_process(instance=instance, tags=tags).success


def _found(instance: dg.DagsterInstance, recipe: Recipe, wanted: StaleStatus) -> set[str]:
    """Assets, or their partitions, that Dagster shows with this status for a recipe."""
    resources = {"storage": Storage(root=""), "servers": VllmServers(), "gpus": GpuPartitions()}
    graph = dg.Definitions(assets=assets_of(recipe), resources=resources).resolve_asset_graph()
    found = set()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    for key in graph.get_all_asset_keys():
        partitions = graph.get(key).partitions_def
        for one in partitions.get_partition_keys() if partitions else [None]:
            if resolver.get_status(key, one) is wanted:
                shard = f" {one.removeprefix(f'{recipe.slug}-')}" if one else ""
                found.add(key.path[-1] + shard)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipe")


@pytest.fixture(scope="module")
def made(folder: Path) -> Iterator[dg.DagsterInstance]:
    """An instance in which all of the recipe is made."""
    with dg.DagsterInstance.ephemeral() as instance:
        _run(instance, _recipe(folder))
        yield instance


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, set()),
        ({"prompts": {"seed": 1}}, {"prompts", *SAMPLES, *AFTER_SAMPLES}),
        ({"generation": {"temperature": 0.1}}, {*SAMPLES, *AFTER_SAMPLES}),
        ({"extraction": {"layers": [1, 2, 4]}}, {"sample_audit", *STATES, *END}),
        ({"extraction": {"precision": "fp8"}}, {"sample_audit", *STATES, *END}),
        ({"training": {"learning_rate": 0.5}}, END),
        (
            {"evaluation": {"speculative_tokens": 2}},
            {"vocabulary_map", "acceptance_report", "released_draft"},
        ),
        ({"generation": {"max_truncated_share": 0.4}}, {"sample_audit"}),
        ({"release": {"license": "mit"}}, {"released_draft"}),
        ({"release": {"folder": "shared"}}, set()),
        ({"owner": "team:models"}, set()),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_changed_setting_marks_exactly_what_it_makes_anew_before_anything_runs(
    made: dg.DagsterInstance, folder: Path, changes: dict[str, Any], expected: set[str]
) -> None:
    assert _found(made, _recipe(folder, **changes), StaleStatus.STALE) == expected


def test_more_prompts_are_missing_shards_and_mark_none_of_those_that_are_there(
    made: dg.DagsterInstance, folder: Path
) -> None:
    before = _recipe(folder)
    source = before.prompts.sources[0].path
    assert source is not None
    rows = source.read_bytes()
    more = _recipe(folder, prompts={"count": 24})
    source.write_bytes(rows)  # tiny_recipe writes more prompts for more
    assert _found(made, more, StaleStatus.MISSING) == {
        "synthetic_samples p8-s002",
        "hidden_state_shards p8-s002",
    }
    stale = _found(made, more, StaleStatus.STALE)
    assert stale == {"prompts", "sample_audit", "vocabulary_map", *END}


def test_one_shard_made_again_marks_its_states_and_what_is_made_from_all_samples(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        _run(instance, recipe)
        _run(instance, recipe, "2", {"synthetic_samples"}, (SHARDS[1], SHARDS[1]))
        marked = _found(instance, recipe, StaleStatus.STALE)
        assert marked == {"hidden_state_shards p8-s001", "sample_audit", "vocabulary_map"}
        _run(instance, recipe, "1", {"sample_audit", "vocabulary_map"})  # they come out the same
        _run(instance, recipe, "2", {"hidden_state_shards"}, (SHARDS[1], SHARDS[1]))
        assert _found(instance, recipe, StaleStatus.STALE) == {"draft_checkpoint"}


def test_from_a_hundred_shards_on_a_shard_marks_its_own_states_alone_and_the_assets_say_so(
    tmp_path: Path,
) -> None:
    recipe = _recipe(tmp_path, prompts={"count": 100, "per_shard": 1})
    again = ("p1-s007", "p1-s007")
    with dg.DagsterInstance.ephemeral() as instance:
        _run(instance, recipe, names={"synthetic_samples", "sample_audit", "hidden_state_shards"})
        _run(instance, recipe, "2", {"synthetic_samples"}, again)
        assert _found(instance, recipe, StaleStatus.STALE) == {"hidden_state_shards p1-s007"}
    notes = {}
    for asset in assets_of(recipe):
        (spec,) = asset.specs
        if (note := spec.metadata.get("not_marked_out_of_date")) is not None:
            notes[spec.key.path[-1]] = note
    assert set(notes) == {"sample_audit", "vocabulary_map", "draft_checkpoint"}
    assert "look at hidden_state_shards" in notes["draft_checkpoint"]
    assert all("100 shards" in note and "larger prompts.per_shard" in note for note in notes.values())


def test_dagster_looks_at_fewer_partitions_than_a_hundred() -> None:
    from dagster._core.definitions import data_version

    from assets import identity

    assert data_version.SKIP_PARTITION_DATA_VERSION_DEPENDENCY_THRESHOLD == identity._TOO_MANY
