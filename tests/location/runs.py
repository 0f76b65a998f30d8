"""Runs that never ran, for tests of what looks at runs, and ticks of what starts them."""

import os
import uuid

import dagster as dg
from dagster._core.definitions.sensor_definition import SensorExecutionData
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)

from resources import Storage


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
