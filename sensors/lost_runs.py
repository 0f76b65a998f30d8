"""Lost runs: Dagster calls them started, but their process is gone after a reboot, a crash or a kill.

The launcher of dagster.yaml starts runs as processes of this machine and never looks at them again. A lost
run would stay "started" for ever: the queue, limited to one run of a pipeline, and the schedule would wait
for it. Its leases are free all the same (the kernel frees them), so all there is to do is to tell Dagster.

A run is lost when

- its status is STARTED: what only starts or is being cancelled is given up by run_monitoring (dagster.yaml),
  and what is queued has no process;
- the process that its newest engine event with a pid names is gone. One of that pid that began after the
  event is another one, for pids are given away again, and start anew with a boot or a container;
- no step works on its recipe: the pid of a run in another container says nothing, the lock of its step does;
- it is still STARTED when it is read again after that: its process may have ended well in between.

A run without such an event is not lost: it has only just started.

Whether it is launched again is Dagster's business (run_retries in dagster.yaml), up to MAX_RELAUNCHES times
and from where it failed. Here it is only allowed to: where something was finished since the run began. A run
that gets nowhere before it is lost would get nowhere again.
"""

import sys
from pathlib import Path

import dagster as dg
import psutil

from eagle3_pipeline.at_work import is_at_work
from eagle3_pipeline.growth import grew_since
from resources import Storage
from sensors.recipe_runs import folders_of

MAX_RELAUNCHES = 3
# Read by Dagster when the run is reported as failed; it counts all runs that go back to the same first one.
_MAX_RETRIES_TAG = "dagster/max_retries"


@dg.sensor(
    name="lost_runs",
    minimum_interval_seconds=60,
    # What is launched again was asked for by somebody and is not done, so nobody has to switch it on.
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Marks runs as failed whose process is gone (reboot, crash, kill -9), so that neither the "
    f"queue nor the schedule waits for them. Dagster launches them again, {MAX_RELAUNCHES} times at most, "
    "where anything was finished since they began. It never ends a process.",
)
def lost_runs_sensor(context: dg.SensorEvaluationContext, storage: Storage) -> dg.SkipReason:
    """One tick: which runs were lost since the last one."""
    lost = report_lost_runs(context.instance, storage.path)
    return dg.SkipReason(f"marked as failed: {', '.join(lost)}" if lost else "no run is lost")


def report_lost_runs(instance: dg.DagsterInstance, root: Path) -> list[str]:
    """Mark the lost runs of this instance as failed; their ids. None where the launcher looks itself.

    `root` is the storage root, where the steps of the runs work.
    """
    if instance.run_launcher.supports_check_run_worker_health:
        return []
    started = dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])
    records = instance.get_run_records(started)
    return [one.dagster_run.run_id for one in records if _report_if_lost(instance, one, root)]


def _report_if_lost(instance: dg.DagsterInstance, record: dg.RunRecord, root: Path) -> bool:
    run_id = record.dagster_run.run_id
    pid, folders = _dead_process(instance, run_id), folders_of(record.dagster_run, root)
    if pid is None or any(map(is_at_work, folders)):
        return False
    run = instance.get_run_by_id(run_id)
    if run is None or run.status != dg.DagsterRunStatus.STARTED:
        return False
    began = record.start_time or record.create_timestamp.timestamp()
    grew = any(grew_since(folder, began) for folder in folders)
    instance.add_run_tags(run_id, {_MAX_RETRIES_TAG: str(MAX_RELAUNCHES if grew else 0)})
    made = "something since it began, so it is worth another attempt" if grew else "nothing since it began"
    instance.report_run_failed(
        run,
        f"Its process (pid {pid}) is gone: killed, or ended with the machine. What is complete is kept. "
        f"It made {made}.",
    )
    return True


def _dead_process(instance: dg.DagsterInstance, run_id: str) -> int | None:
    """The pid of the run's process if that is gone."""
    for entry in reversed(instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)):
        named = entry.get_dagster_event().engine_event_data.metadata.get("pid")
        if named is not None:
            pid = int(str(named.value))
            return None if _lives(pid, entry.timestamp) else pid
    return None


def _lives(pid: int, seen_at: float) -> bool:
    """Whether the process that had this pid at that time (seconds since the epoch) still runs."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= seen_at
    except psutil.NoSuchProcess:
        return False


def main() -> None:
    """Look once, for `eagle3 doctor --repair`: `python -m sensors.lost_runs STORAGE_ROOT`."""
    with dg.DagsterInstance.get() as instance:
        lost = report_lost_runs(instance, Path(sys.argv[1]))
    for run_id in lost:
        print(f"{'ok':<9}run {run_id[:8]} was lost, and Dagster knows now that it failed")


if __name__ == "__main__":
    main()
