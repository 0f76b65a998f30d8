"""From a manifest to what Dagster shows: metadata, data version, events of shards and of a step at work."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from assets.identity import asset_key, partition_key
from eagle3_pipeline.generation.vitals import Vitals
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.recipe import Recipe

# Hundreds of numbers, which an asset shows as pictures.
_BULKY = {"server_history"}


def metadata(manifest: Manifest, folder: Path) -> dict[str, Any]:
    """Metadata of a made thing: where it lies, how large it is, and its facts."""
    return {
        "path": dg.MetadataValue.path(folder),
        "bytes": manifest.bytes,
        "digest": manifest.digest[:12],
        "fingerprint": manifest.fingerprint[:12],
        "commit": manifest.made_by.get("commit", "unknown"),
        **{name: _value(value) for name, value in manifest.facts.items() if name not in _BULKY},
    }


def outcome(
    place: Place, manifest: Manifest, *checks: dg.AssetCheckResult, decided_by: Any = None, **extra: Any
) -> dg.MaterializeResult:
    """The result of an asset without partitions.

    Its data version is the digest of what came out; or where what is made from it depends on less than
    that, it follows from `decided_by`, so that nothing is out of date that no step would make anew.
    """
    version = manifest.digest if decided_by is None else fingerprint(decided_by)
    return dg.MaterializeResult(
        metadata={**metadata(manifest, place.folder), **extra},
        data_version=dg.DataVersion(version[:16]),
        check_results=checks,
    )


def announce(
    context: dg.AssetExecutionContext,
    recipe: Recipe,
    place_of: Callable[[str], Place],
    pictures: Callable[[Manifest], dict[str, Any]] = lambda _: {},
) -> Callable[[str, Manifest], None]:
    """A callback that makes a shard's partition green the moment its manifest is written.

    The event logged here is durable at once, so that a failure at the next shard does not take it
    back; the same metadata is left for the step's own final event, which comes for every partition.
    """

    def on_shard(shard: str, manifest: Manifest) -> None:
        key = partition_key(recipe, shard)
        values = {**metadata(manifest, place_of(shard).folder), **pictures(manifest)}
        asset = asset_key(recipe, manifest.asset)
        context.log_event(dg.AssetMaterialization(asset, partition=key, metadata=values))
        context.add_asset_metadata(values, asset_key=asset, partition_key=key)

    return on_shard


def observe(context: dg.AssetExecutionContext, key: dg.AssetKey) -> Callable[[Vitals], None]:
    """A callback that notes how a step at work is doing, each time that another whole percent is done.

    What earlier attempts did counts as done, so that all attempts of a run together note it a hundred times
    at most.
    """
    noted = -1

    def on_pulse(vitals: Vitals) -> None:
        nonlocal noted
        if noted < 0:
            noted = vitals.percent(vitals.before)
        if vitals.percent(vitals.done) > noted:
            noted = vitals.percent(vitals.done)
            context.log_event(dg.AssetObservation(key, metadata={**vitals.numbers(), "pulse": vitals.line()}))

    return on_pulse


def range_outcome(manifests: list[Manifest], *checks: dg.AssetCheckResult) -> dg.MaterializeResult:
    """The result of a step over a range of shards: Dagster gives all of them this one data version."""
    version = dg.DataVersion(fingerprint([one.digest for one in manifests])[:16])
    return dg.MaterializeResult(data_version=version, check_results=checks)


def table(rows: Sequence[Mapping[str, Any]]) -> dg.TableMetadataValue:
    """Rows as a table; all have the same columns."""
    return dg.MetadataValue.table([dg.TableRecord(dict(row)) for row in rows])


def _value(value: Any) -> Any:
    if isinstance(value, str | bool | int | float):
        return value
    return dg.MetadataValue.json(value)
