"""The job that makes everything of one recipe in one run."""

from typing import TYPE_CHECKING

import dagster as dg

from assets.identity import partition_key
from eagle3_pipeline.recipe import Recipe

if TYPE_CHECKING:
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

PIPELINE_TAG = "eagle3/pipeline"


def pipeline_job(recipe: Recipe, assets: list[dg.AssetsDefinition]) -> "UnresolvedAssetJobDefinition":
    """Job `<slug>_pipeline`: all assets over all shards of the run, with or without a daemon.

    The range tags let partitioned and unpartitioned assets share one run. PIPELINE_TAG is limited to
    one run at a time in dagster.yaml.
    """
    first, last = partition_key(recipe, recipe.shards[0]), partition_key(recipe, recipe.shards[-1])
    return dg.define_asset_job(
        f"{recipe.slug}_pipeline",
        selection=dg.AssetSelection.assets(*(asset.key for asset in assets)),
        description=f"Prompts to released draft: {len(recipe.shards)} shards of {recipe.prompts.per_shard}.",
        tags={
            "dagster/asset_partition_range_start": first,
            "dagster/asset_partition_range_end": last,
            PIPELINE_TAG: recipe.slug,
        },
    )
