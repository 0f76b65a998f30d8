"""acceptance_report: what the draft is worth on the real server."""

from functools import partial
from typing import Any

import dagster as dg

from assets.identity import asset_key, identity
from assets.outcome import outcome
from assets.step import RETRIES, step
from eagle3_pipeline.evaluation.agreement import explanation
from eagle3_pipeline.evaluation.evaluation import evaluate_draft
from eagle3_pipeline.evaluation.page import PAGE_NAME
from eagle3_pipeline.evaluation.pictures import position_picture, speedup_picture
from eagle3_pipeline.evaluation.tables import tables_of
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.plots import markdown_image
from eagle3_pipeline.recipe import Recipe
from resources import Storage, VllmServers

SIMULATION_AGREES = "simulation_agrees"


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""
    agreement = dg.AssetCheckSpec(
        SIMULATION_AGREES,
        asset=asset_key(recipe, "acceptance_report"),
        description="Served and simulated acceptance of the conversations that judged agree within 3 %.",
    )

    @dg.asset(
        **identity(recipe, "acceptance_report", {"vllm"}, ("draft_checkpoint",)),
        retry_policy=RETRIES,
        check_specs=[agreement],
    )
    def acceptance_report(storage: Storage, servers: VllmServers) -> dg.MaterializeResult:
        """Acceptance and speed of the draft, by vLLM's own counters, on prompts held out from training.

        The same server is measured with the draft, with the base draft if there is one, and without. With the
        draft, it also answers the conversations that judged it in training: what is served must be what was
        simulated. At temperature 0 the draft must not change answers.
        """
        lineage = storage.lineage(recipe)
        with step():
            manifest = evaluate_draft(lineage, partial(servers.evaluation, lineage))
            place, found = lineage.acceptance_report(), _agreement(manifest)
            page = dg.MetadataValue.path(place.folder / PAGE_NAME)
            return outcome(place, manifest, found, page=page, **_pictures(manifest), **_tables(manifest))

    return acceptance_report


def _agreement(manifest: Manifest) -> dg.AssetCheckResult:
    """A warning where they do not agree: the draft may still be the best there is, so nothing is stopped."""
    ratio = manifest.facts["simulation_ratio"]
    return dg.AssetCheckResult(
        check_name=SIMULATION_AGREES,
        passed=bool(manifest.facts["simulation_agrees"]),
        severity=dg.AssetCheckSeverity.WARN,
        description=explanation(manifest.facts),
        metadata={} if ratio is None else {"simulation_ratio": ratio},
    )


def _pictures(manifest: Manifest) -> dict[str, Any]:
    drawn = {
        "acceptance_plot": (position_picture(manifest.facts), "acceptance by position"),
        "speedup_plot": (speedup_picture(manifest.facts), "speed-up by set"),
    }
    return {name: dg.MetadataValue.md(markdown_image(png, alt)) for name, (png, alt) in drawn.items()}


def _tables(manifest: Manifest) -> dict[str, Any]:
    return {
        name: dg.MetadataValue.table([dg.TableRecord(dict(row)) for row in rows])
        for name, rows in tables_of(manifest.facts).items()
        if rows
    }
