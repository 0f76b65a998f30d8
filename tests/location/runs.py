"""Runs for tests: made in this process, or such as never ran; and ticks of what starts them."""

import os
import uuid
from pathlib import Path

import dagster as dg
from dagster._core.definitions.sensor_definition import SensorExecutionData
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.recipe import load_recipe
from resources import Storage

SHARDS = ["tiny-p8-s000", "tiny-p8-s001", "tiny-p8-s002"]
"""The partitions of a recipe of `tiny_recipe`."""


def run_assets(
    definitions: dg.Definitions,
    instance: dg.DagsterInstance,
    *names: str,
    shards: tuple[str, str] = (SHARDS[0], SHARDS[-1]),
) -> dg.ExecuteInProcessResult:
    """Run the named assets of `tiny` in this process, over all shards or from one to another."""
    chosen = [dg.AssetKey(["tiny", name]) for name in names]
    bounds = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")
    job = definitions.resolve_job_def("tiny_pipeline")
    return job.execute_in_process(
        instance=instance,
        asset_selection=chosen,
        tags=dict(zip(bounds, shards, strict=True)),
        raise_on_error=False,
    )


def lineage_of(recipe: Path) -> Lineage:
    """The lineage of a recipe in the test's own storage."""
    return Lineage(load_recipe(str(recipe), recipe.parent), Path(os.environ["EAGLE3_STORAGE"]))


def _storage() -> Storage:
    return Storage(root=os.environ["EAGLE3_STORAGE"])


def tick_schedule(definitions: dg.Definitions, instance: dg.DagsterInstance, schedule: str) -> object:
    """What a schedule says now."""
    # An instance on disk: the context opens it by its address, which one in memory has not.
    with dg.build_schedule_context(instance=instance, resources={"storage": _storage()}) as context:
        return definitions.resolve_schedule_def(schedule)(context)


def tick_sensor(
    definitions: dg.Definitions, instance: dg.DagsterInstance, sensor: str, cursor: str | None = None
) -> SensorExecutionData:
    """What a sensor says now."""
    with dg.build_sensor_context(
        instance=instance, cursor=cursor, resources={"storage": _storage()}, definitions=definitions
    ) as context:
        return definitions.resolve_sensor_def(sensor).evaluate_tick(context)


def add_run(
    instance: dg.DagsterInstance, job: str, status: dg.DagsterRunStatus, tags: dict[str, str] | None = None
) -> str:
    """Add a run of this job with this status; its id."""
    run_id = str(uuid.uuid4())
    # Where the job comes from: Dagster queues no run without it.
    location = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("eagle3"), "__repository__")
    origin = RemoteJobOrigin(location, job)
    instance.add_run(
        dg.DagsterRun(job_name=job, run_id=run_id, status=status, tags=tags, remote_job_origin=origin)
    )
    return run_id
