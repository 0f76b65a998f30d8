"""The nightly schedule: makes what is missing, and skips while a run of the recipe is active, of any job.

Active is a run that Dagster does not call over, unless it is lost: then its process is gone (lost_runs.py).
"""

from typing import TYPE_CHECKING

import dagster as dg

from eagle3_pipeline.recipe import Recipe
from sensors.lost_runs import report_lost_runs

if TYPE_CHECKING:
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

_OVER = {dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED}
# All others, those included that Dagster adds (1.13 brought SUSPENDED): one run too few does no harm.
ACTIVE = [status for status in dg.DagsterRunStatus if status not in _OVER]


def tags_of_recipe(job: "UnresolvedAssetJobDefinition") -> dict[str, str]:
    """The tags that the runs of all jobs of a recipe have in common."""
    return {name: str(value) for name, value in (job.tags or {}).items() if name.startswith("eagle3/")}


def nightly_schedule(recipe: Recipe, job: "UnresolvedAssetJobDefinition") -> dg.ScheduleDefinition:
    """Runs `job` at 01:00; what is complete is found by its manifest and not made again."""

    @dg.schedule(
        name=f"{recipe.slug}_nightly",
        job=job,
        cron_schedule="0 1 * * *",
        description="Makes what is missing or out of date; skips while a run of this recipe is active.",
    )
    def nightly(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        # The sensor does so every minute, but somebody may have switched it off.
        report_lost_runs(context.instance)
        # By the tag of the recipe and not by the job: a recipe in waves has a job for the waves, too.
        of_recipe = dg.RunsFilter(tags=tags_of_recipe(job), statuses=ACTIVE)
        if active := context.instance.get_runs(of_recipe, limit=1):
            return dg.SkipReason(
                f"run {active[0].run_id[:8]} of {active[0].job_name} is {active[0].status.value}"
            )
        return dg.RunRequest(tags=job.tags)

    return nightly
