"""The nightly schedule: makes what is missing or out of date, unless somebody is at it."""

from typing import TYPE_CHECKING

import dagster as dg

from eagle3_pipeline.errors import Eagle3Error
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import Recipe
from resources import Storage
from sensors.lost_runs import report_lost_runs
from sensors.recipe_runs import why_busy

if TYPE_CHECKING:
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition


def nightly_schedule(recipe: Recipe, job: "UnresolvedAssetJobDefinition") -> dg.ScheduleDefinition:
    """Runs `job` at 01:00; what is complete is found by its manifest and not made again."""

    @dg.schedule(
        name=f"{recipe.slug}_nightly",
        job=job,
        cron_schedule="0 1 * * *",
        description="Makes what is missing or out of date; skips while a run of this recipe is active, and "
        "where the draft of these settings is released.",
    )
    def nightly(context: dg.ScheduleEvaluationContext, storage: Storage) -> dg.RunRequest | dg.SkipReason:
        root = storage.path
        # The sensor does so every minute, but somebody may have switched it off.
        report_lost_runs(context.instance, root)
        if busy := why_busy(context.instance, root, recipe.slug):
            return dg.SkipReason(busy)
        if _is_released(storage.lineage(recipe)):
            return dg.SkipReason("the draft is released, and nothing that it is made from has changed")
        return dg.RunRequest(tags=job.tags)

    return nightly


def _is_released(lineage: Lineage) -> bool:
    try:
        return lineage.released() is not None
    except Eagle3Error:  # the run says where people look for it
        return False
