"""What all assets of a recipe share: keys, group, owner, partitions, settings' version, one run a range."""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from assets.automation import automation_condition
from eagle3_pipeline.asset_settings import settings_version
from eagle3_pipeline.recipe import Recipe

_PARTITIONED = {"synthetic_samples", "hidden_state_shards"}
# From so many partitions on, Dagster does not ask whether they have changed (its source names the number
# SKIP_PARTITION_DATA_VERSION_DEPENDENCY_THRESHOLD).
_TOO_MANY = 100


def asset_key(recipe: Recipe, name: str) -> dg.AssetKey:
    """Key of an asset: the recipe's slug keeps recipes apart in one Dagster instance."""
    return dg.AssetKey([recipe.slug, name])


def identity(
    recipe: Recipe,
    name: str,
    kinds: set[str],
    deps: tuple[str, ...] = (),
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Arguments of `dg.asset` that follow from the recipe and the asset's name.

    Every asset, partitioned or not, takes all its partitions in one run: only so can one run, without
    a daemon, make the whole graph. The code version is that of the settings: a changed one marks as out of
    date what would be made anew, before anything runs.
    """
    return {
        "key": asset_key(recipe, name),
        "group_name": recipe.slug,
        "kinds": kinds,
        "deps": [asset_key(recipe, dep) for dep in deps],
        "automation_condition": automation_condition(recipe, name),
        "backfill_policy": dg.BackfillPolicy.single_run(),
        "tags": {"eagle3/recipe": recipe.slug},
        "owners": [recipe.owner] if recipe.owner else None,
        "code_version": f"settings-{settings_version(recipe, name)}",
        "metadata": {**(metadata or {}), **_unseen(recipe, name, deps)},
    }


def _unseen(recipe: Recipe, name: str, deps: tuple[str, ...]) -> dict[str, str]:
    """What Dagster will not see of an asset that is made from too many partitions, as its metadata."""
    many = sorted(_PARTITIONED & set(deps))
    if name in _PARTITIONED or not many or len(recipe.shards) < _TOO_MANY:
        return {}
    return {
        "not_marked_out_of_date": f"This recipe has {len(recipe.shards)} shards. From {_TOO_MANY} on, "
        f"Dagster does not look at {' and '.join(many)}: a shard that is made again does not mark this "
        "asset. Its step looks at the manifests, and makes anew what must be. A larger prompts.per_shard "
        "gives fewer shards."
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
