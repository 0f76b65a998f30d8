"""acceptance_report: what the draft is worth on the real server."""

from typing import Any

import dagster as dg

from assets.identity import identity
from assets.outcome import outcome
from assets.step import RETRIES, step
from eagle3_pipeline.evaluation.evaluation import evaluate_draft
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.plots import bars, markdown_image
from eagle3_pipeline.recipe import Recipe
from resources import Storage, VllmServers


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""

    @dg.asset(**identity(recipe, "acceptance_report", {"vllm"}, ("draft_checkpoint",)), retry_policy=RETRIES)
    def acceptance_report(storage: Storage, servers: VllmServers) -> dg.MaterializeResult:
        """Acceptance and speed of the draft, by vLLM's own counters, on prompts held out from training.

        The same server is measured without the draft and with it.
        """
        lineage = storage.lineage(recipe)
        with step():
            manifest = evaluate_draft(lineage, lambda draft: servers.evaluation(lineage, draft))
            return outcome(lineage.acceptance_report(), manifest, **_pictures(manifest))

    return acceptance_report


def _pictures(manifest: Manifest) -> dict[str, Any]:
    image = bars(manifest.facts["acceptance_by_position"], "Acceptance by position", "speculated token")
    return {"acceptance_plot": dg.MetadataValue.md(markdown_image(image, "acceptance by position"))}
