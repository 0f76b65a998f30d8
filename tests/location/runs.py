"""Runs that never ran, for tests of what looks at runs."""

import uuid

import dagster as dg
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)


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
