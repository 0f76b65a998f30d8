"""draft_checkpoint: the trained draft."""

import json
from collections.abc import Mapping
from typing import Any

import dagster as dg

from assets.checks import check_draft, checks_of
from assets.identity import asset_key, identity, partition_key
from assets.outcome import outcome, table
from assets.step import RETRIES, step
from eagle3_pipeline.made_from import draft_made_from
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.plots import bars, curves, lines, markdown_image
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.training.events import Listener
from eagle3_pipeline.training.observations import Observations
from eagle3_pipeline.training.training import train_draft
from eagle3_pipeline.waves import TurnRecord
from resources import GpuPartitions, Storage


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""
    deps = ("hidden_state_shards", "vocabulary_map", *(("base_draft",) if recipe.base_draft else ()))

    @dg.asset(
        **identity(recipe, "draft_checkpoint", {"pytorch"}, deps),
        retry_policy=RETRIES,
        check_specs=checks_of(recipe, "draft_checkpoint"),
    )
    def draft_checkpoint(
        context: dg.AssetExecutionContext, storage: Storage, gpus: GpuPartitions
    ) -> dg.MaterializeResult:
        """The EAGLE-3 draft, trained on the hidden states in a process of its own.

        A stopped training goes on from its last checkpoint. The best checkpoint is chosen by the
        acceptance length that it would have in serving, on samples that were never trained on. In
        waves, each materialisation trains on the next one, and the last one makes the draft. Of several
        alternatives, the one with the longest acceptance goes on.
        """
        lineage, shards = storage.lineage(recipe), _shards_of_run(context.run.tags, recipe)
        with step(lineage):
            made = train_draft(lineage, gpus.training(recipe), shards, _observe(context, recipe))
            place, judged = lineage.draft_checkpoint(), check_draft(recipe, made.facts)
            if isinstance(made, TurnRecord):
                return _outcome_of_turn(made, place, judged)
            rows = table(draft_made_from(lineage))
            return outcome(place, made, *judged, made_from=rows, **_pictures(made), **_numbers(made))

    return draft_checkpoint


def _observe(context: dg.AssetExecutionContext, recipe: Recipe) -> Listener:
    """Shows how the training goes, in at most a hundred observations."""
    chosen = Observations(max(1, len(recipe.training.sweep)))
    key = asset_key(recipe, "draft_checkpoint")

    def on_event(event: dict[str, Any]) -> None:
        if (values := chosen.of(event)) is not None:
            context.log_event(dg.AssetObservation(key, metadata=values))

    return on_event


def _shards_of_run(tags: Mapping[str, str], recipe: Recipe) -> tuple[str, ...] | None:
    """The shards of the run's partitions: this asset has none of its own. None where the run has no range."""
    start, end = (tags.get(f"dagster/asset_partition_range_{name}") for name in ("start", "end"))
    keys = [partition_key(recipe, shard) for shard in recipe.shards]
    if start not in keys or end not in keys:
        return None
    return recipe.shards[keys.index(start) : keys.index(end) + 1]


def _outcome_of_turn(
    record: TurnRecord, place: Place, judged: list[dg.AssetCheckResult]
) -> dg.MaterializeResult:
    """A wave that is done: no draft yet, so that the next wave is another version of this asset."""
    facts = {name: value for name, value in record.facts.items() if isinstance(value, int | float)}
    values = {"waves": record.name, "path": dg.MetadataValue.path(place.folder), **facts}
    version = dg.DataVersion(record.checkpoint[:16])
    return dg.MaterializeResult(metadata=values, data_version=version, check_results=judged)


def _pictures(manifest: Manifest) -> dict[str, Any]:
    facts = manifest.facts
    loss, held_out = facts["loss_curve"], facts["validation_curve"]
    length, by_position = "acceptance_length", facts["simulated_acceptance_by_position"]
    drawn = {
        "loss_plot": lines(loss["steps"], {"loss": loss["loss"]}, "Training loss", "step"),
        "acceptance_plot": lines(
            held_out["steps"], {length: held_out[length]}, "Acceptance length on held-out samples", "step"
        ),
        "position_plot": bars(by_position, "Simulated acceptance by position", "position"),
    }
    rows = facts.get("sweep", ())
    measured = {one["alternative"]: one["validation_curve"] for one in rows if one["validation_curve"]}
    if rows:
        series = {name: (curve["steps"], curve[length]) for name, curve in measured.items()}
        drawn["sweep_plot"] = curves(series, "Acceptance length of the alternatives", "step")
    images = {name: markdown_image(png, name.replace("_", " ")) for name, png in drawn.items()}
    pictures: dict[str, Any] = {name: dg.MetadataValue.md(image) for name, image in images.items()}
    return pictures | ({"sweep": _table(rows)} if rows else {})


def _numbers(manifest: Manifest) -> dict[str, float]:
    """What the facts have in a list, as numbers that Dagster draws over time."""
    shares = manifest.facts["simulated_acceptance_by_position"]
    return {f"simulated_acceptance_{k}": share for k, share in enumerate(shares, 1)}


def _table(rows: list[dict[str, Any]]) -> dg.TableMetadataValue:
    """The alternatives, the longest acceptance first; those that failed at the end."""
    ranked = sorted(rows, key=lambda one: -(one["acceptance_length"] or 0))
    return dg.MetadataValue.table([dg.TableRecord(_line(one)) for one in ranked])


def _line(row: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in row.items() if name != "validation_curve"}
    return {**plain, "settings": json.dumps(row["settings"]), "failed": row["failed"] or ""}
