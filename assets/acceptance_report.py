"""acceptance_report: what the draft is worth on the real server."""

from functools import partial
from typing import Any

import dagster as dg

from assets.checks import check_report, checks_of
from assets.identity import identity
from assets.outcome import outcome
from assets.step import RETRIES, step
from eagle3_pipeline.evaluation.evaluation import evaluate_draft
from eagle3_pipeline.evaluation.page import PAGE_NAME
from eagle3_pipeline.evaluation.pictures import position_picture, speedup_picture
from eagle3_pipeline.evaluation.tables import tables_of
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.plots import markdown_image
from eagle3_pipeline.recipe import Recipe
from resources import Storage, VllmServers


def build(recipe: Recipe) -> dg.AssetsDefinition:
    """The asset for one recipe."""

    @dg.asset(
        **identity(recipe, "acceptance_report", {"vllm"}, ("draft_checkpoint",)),
        retry_policy=RETRIES,
        check_specs=checks_of(recipe, "acceptance_report"),
    )
    def acceptance_report(storage: Storage, servers: VllmServers) -> dg.MaterializeResult:
        """Acceptance and speed of the draft, by vLLM's own counters, on prompts held out from training.

        The same server is measured with the draft, with the base draft if there is one, and without. With the
        draft, it also answers the conversations that judged it in training: what is served must be what was
        simulated. At temperature 0 the draft must not change answers.
        """
        lineage = storage.lineage(recipe)
        with step(lineage):
            manifest = evaluate_draft(lineage, partial(servers.evaluation, lineage))
            place, judged = lineage.acceptance_report(), check_report(manifest.facts)
            page = dg.MetadataValue.path(place.folder / PAGE_NAME)
            return outcome(
                place,
                manifest,
                *judged,
                page=page,
                **_pictures(manifest),
                **_tables(manifest),
                **_numbers(manifest),
            )

    return acceptance_report


def _pictures(manifest: Manifest) -> dict[str, Any]:
    drawn = {
        "acceptance_plot": (position_picture(manifest.facts), "acceptance by position"),
        "speedup_plot": (speedup_picture(manifest.facts), "speed-up by set"),
    }
    return {name: dg.MetadataValue.md(markdown_image(png, alt)) for name, (png, alt) in drawn.items()}


def _numbers(manifest: Manifest) -> dict[str, float]:
    """What the facts have in lists and by set, as numbers that Dagster draws over time."""
    facts = manifest.facts
    by_position = {f"acceptance_{k}": share for k, share in enumerate(facts["acceptance_by_position"], 1)}
    return by_position | {f"speedup/{name}": one["speedup"] for name, one in facts["sets"].items()}


def _tables(manifest: Manifest) -> dict[str, Any]:
    return {
        name: dg.MetadataValue.table([dg.TableRecord(dict(row)) for row in rows])
        for name, rows in tables_of(manifest.facts).items()
        if rows
    }
