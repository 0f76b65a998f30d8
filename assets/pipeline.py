"""The jobs of one recipe: everything in one run, one shard a run, and waves."""

from typing import TYPE_CHECKING

import dagster as dg

from assets.identity import asset_key, partition_key
from eagle3_pipeline.recipe import Recipe

if TYPE_CHECKING:
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

PIPELINE_TAG = "eagle3/pipeline"

_IN_WAVES = {"hidden_state_shards", "draft_checkpoint"}
_AFTER_WAVES = {"acceptance_report", "released_draft"}


def pipeline_job(recipe: Recipe, assets: list[dg.AssetsDefinition]) -> "UnresolvedAssetJobDefinition":
    """Job `<slug>_pipeline`: all assets over all shards of the run, with or without a daemon."""
    what = f"Prompts to released draft: {len(recipe.shards)} shards of {recipe.prompts.per_shard}."
    return _job(recipe, "pipeline", {asset.key.path[-1] for asset in assets}, what)


def wave_jobs(recipe: Recipe, assets: list[dg.AssetsDefinition]) -> list["UnresolvedAssetJobDefinition"]:
    """Jobs `<slug>_samples`, `<slug>_wave` and `<slug>_release` of a recipe that is trained in waves.

    A run of `<slug>_wave` takes one wave: whoever starts it sets the range of partitions.
    """
    before = {asset.key.path[-1] for asset in assets} - _IN_WAVES - _AFTER_WAVES
    return [
        _job(recipe, "samples", before, "Up to the plan of waves."),
        _job(recipe, "wave", _IN_WAVES, "One wave: its hidden states, and the training on them."),
        _job(recipe, "release", _AFTER_WAVES, "After the last wave: the measurement and the release."),
    ]


def shard_jobs(recipe: Recipe) -> list["UnresolvedAssetJobDefinition"]:
    """Jobs `<slug>_generate_samples` and `<slug>_extract_states`: one asset, a run for each shard.

    For `dagster job backfill`, which makes one run per partition. A server outlasts the runs.
    """
    what = {"generate_samples": "synthetic_samples", "extract_states": "hidden_state_shards"}
    return [
        dg.define_asset_job(
            f"{recipe.slug}_{suffix}",
            selection=dg.AssetSelection.assets(asset_key(recipe, name)),
            description=f"One shard of {name} per run: for a backfill over shards.",
            tags={PIPELINE_TAG: recipe.slug},
        )
        for suffix, name in what.items()
    ]


def _job(recipe: Recipe, suffix: str, names: set[str], description: str) -> "UnresolvedAssetJobDefinition":
    """A job over all shards of the run.

    The range tags let partitioned and unpartitioned assets share one run. PIPELINE_TAG is limited to
    one run at a time in dagster.yaml.
    """
    first, last = partition_key(recipe, recipe.shards[0]), partition_key(recipe, recipe.shards[-1])
    return dg.define_asset_job(
        f"{recipe.slug}_{suffix}",
        selection=dg.AssetSelection.assets(*(asset_key(recipe, name) for name in sorted(names))),
        description=description,
        tags={
            "dagster/asset_partition_range_start": first,
            "dagster/asset_partition_range_end": last,
            PIPELINE_TAG: recipe.slug,
        },
    )
