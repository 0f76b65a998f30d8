"""What all assets of a recipe share: keys, group, partitions, and that one run takes a whole range."""

from typing import Any

import dagster as dg

from eagle3_pipeline.recipe import Recipe


def asset_key(recipe: Recipe, name: str) -> dg.AssetKey:
    """Key of an asset: the recipe's slug keeps recipes apart in one Dagster instance."""
    return dg.AssetKey([recipe.slug, name])


def identity(recipe: Recipe, name: str, kinds: set[str], deps: tuple[str, ...] = ()) -> dict[str, Any]:
    """Arguments of `dg.asset` that follow from the recipe and the asset's name.

    Every asset, partitioned or not, takes all its partitions in one run: only so can one run, without
    a daemon, make the whole graph.
    """
    return {
        "key": asset_key(recipe, name),
        "group_name": recipe.slug,
        "kinds": kinds,
        "deps": [asset_key(recipe, dep) for dep in deps],
        "backfill_policy": dg.BackfillPolicy.single_run(),
        "tags": {"eagle3/recipe": recipe.slug},
    }


def partition_key(recipe: Recipe, shard: str) -> str:
    """Partition key of a shard, such as `smollm2_cpu-p100-s003`."""
    return f"{recipe.slug}-{shard}"


def shard_partitions(recipe: Recipe) -> dg.StaticPartitionsDefinition:
    """One partition per shard that a run takes."""
    return dg.StaticPartitionsDefinition([partition_key(recipe, shard) for shard in recipe.shards])


def shards_of(context: dg.AssetExecutionContext, recipe: Recipe) -> list[str]:
    """The shards of the partitions that this step makes."""
    return [key.removeprefix(f"{recipe.slug}-") for key in context.partition_keys]
