"""draft_checkpoint: the trained draft."""

from typing import Any

import dagster as dg

from assets.identity import identity
from assets.outcome import outcome
from assets.step import RETRIES, step
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.plots import lines, markdown_image
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.training.training import train_draft
from resources import GpuPartitions, Storage


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""
    deps = ("hidden_state_shards", "vocabulary_map", *(("base_draft",) if recipe.base_draft else ()))

    @dg.asset(**identity(recipe, "draft_checkpoint", {"pytorch"}, deps), retry_policy=RETRIES)
    def draft_checkpoint(storage: Storage, gpus: GpuPartitions) -> dg.MaterializeResult:
        """The EAGLE-3 draft, trained on the hidden states in a process of its own.

        A stopped training goes on from its last checkpoint. The best checkpoint is chosen by the
        acceptance length that it would have in serving, on samples that were never trained on.
        """
        lineage = storage.lineage(recipe)
        with step():
            manifest = train_draft(lineage, gpus.training(recipe))
            return outcome(lineage.draft_checkpoint(), manifest, **_pictures(manifest))

    return draft_checkpoint


def _pictures(manifest: Manifest) -> dict[str, Any]:
    curve = manifest.facts["loss_curve"]
    image = lines(curve["steps"], {"loss": curve["loss"]}, "Training loss", "step")
    return {"loss_plot": dg.MetadataValue.md(markdown_image(image, "training loss by step"))}
