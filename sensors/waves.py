"""The sensor that starts the runs of a recipe in waves one after the other, as `eagle3 run` does.

What lies on the disk says which run is next (eagle3_pipeline/wave_runs.py). It is started once: while any run
of the recipe is active the sensor waits, and a run that failed or was cancelled is not started again. When
a person has it re-executed, and it ends well, the sensor goes on.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import dagster as dg

from eagle3_pipeline.errors import Eagle3Error
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import Recipe
from eagle3_pipeline.wave_runs import WAVE_RUN_TAG, next_run
from resources import Storage
from sensors.lost_runs import report_lost_runs
from sensors.recipe_runs import RECIPE_TAG, why_busy

if TYPE_CHECKING:
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition


def waves_sensor(recipe: Recipe, jobs: Sequence["UnresolvedAssetJobDefinition"]) -> dg.SensorDefinition:
    """Sensor `<slug>_waves` over the jobs of the waves."""

    @dg.sensor(
        name=f"{recipe.slug}_waves",
        jobs=jobs,
        minimum_interval_seconds=60,
        # It starts runs that take all GPUs for hours: never unasked.
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Starts the runs of the waves one after the other: the samples, each wave, the release. "
        "It never starts a second run beside one, and none again that failed.",
    )
    def waves(context: dg.SensorEvaluationContext, storage: Storage) -> dg.RunRequest | dg.SkipReason:
        # The sensor of lost runs does so every minute, but somebody may have switched it off.
        report_lost_runs(context.instance, storage.path)
        return _next(context.instance, storage.lineage(recipe))

    return waves


def _next(instance: dg.DagsterInstance, lineage: Lineage) -> dg.RunRequest | dg.SkipReason:
    slug = lineage.recipe.slug
    if busy := why_busy(instance, lineage.storage_root, slug):
        return dg.SkipReason(busy)
    try:
        run = next_run(lineage)
    except Eagle3Error as error:
        return dg.SkipReason(f"{type(error).__name__}: {error}")
    if run is None:
        return dg.SkipReason("the draft is released")
    before = instance.get_runs(dg.RunsFilter(tags={WAVE_RUN_TAG: run.key}), limit=1)
    if before:
        return dg.SkipReason(
            f"next is {run.what}, but run {before[0].run_id[:8]} of it is {before[0].status.value}: look at "
            "it, then re-execute it from the web UI"
        )
    return dg.RunRequest(run_key=run.key, job_name=run.job, tags={RECIPE_TAG: slug, **run.tags})
