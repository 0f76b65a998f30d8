"""draft_checkpoint: the trained draft."""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from assets.identity import identity, partition_key
from assets.outcome import outcome
from assets.step import RETRIES, step
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.plots import lines, markdown_image
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.training.training import train_draft
from eagle3_pipeline.waves import TurnRecord
from resources import GpuPartitions, Storage


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""
    deps = ("hidden_state_shards", "vocabulary_map", *(("base_draft",) if recipe.base_draft else ()))

    @dg.asset(**identity(recipe, "draft_checkpoint", {"pytorch"}, deps), retry_policy=RETRIES)
    def draft_checkpoint(
        context: dg.AssetExecutionContext, storage: Storage, gpus: GpuPartitions
    ) -> dg.MaterializeResult:
        """The EAGLE-3 draft, trained on the hidden states in a process of its own.

        A stopped training goes on from its last checkpoint. The best checkpoint is chosen by the
        acceptance length that it would have in serving, on samples that were never trained on. In
        waves, each materialisation trains on the next one, and the last one makes the draft.
        """
        lineage = storage.lineage(recipe)
        with step():
            made = train_draft(lineage, gpus.training(recipe), _shards_of_run(context.run.tags, recipe))
            if isinstance(made, TurnRecord):
                return _outcome_of_turn(made, lineage.draft_checkpoint())
            return outcome(lineage.draft_checkpoint(), made, **_pictures(made))

    return draft_checkpoint


def _shards_of_run(tags: Mapping[str, str], recipe: Recipe) -> tuple[str, ...] | None:
    """The shards of the run's partitions: this asset has none of its own. None where the run has no range."""
    start, end = (tags.get(f"dagster/asset_partition_range_{name}") for name in ("start", "end"))
    keys = [partition_key(recipe, shard) for shard in recipe.shards]
    if start not in keys or end not in keys:
        return None
    return recipe.shards[keys.index(start) : keys.index(end) + 1]


def _outcome_of_turn(record: TurnRecord, place: Place) -> dg.MaterializeResult:
    """A wave that is done: no draft yet, so that the next wave is another version of this asset."""
    facts = {name: value for name, value in record.facts.items() if isinstance(value, int | float)}
    values = {"waves": record.name, "path": dg.MetadataValue.path(place.folder), **facts}
    return dg.MaterializeResult(metadata=values, data_version=dg.DataVersion(record.checkpoint[:16]))


def _pictures(manifest: Manifest) -> dict[str, Any]:
    curve = manifest.facts["loss_curve"]
    image = lines(curve["steps"], {"loss": curve["loss"]}, "Training loss", "step")
    return {"loss_plot": dg.MetadataValue.md(markdown_image(image, "training loss by step"))}
