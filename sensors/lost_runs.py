"""Lost runs: Dagster calls them started, but their process is gone after a reboot, a crash or a kill.

The launcher of dagster.yaml starts runs as processes of this machine and never looks at them again. A lost
run would stay "started" for ever: the queue, limited to one run of a pipeline, and the schedule would wait
for it. Its leases are free all the same (the kernel frees them), so all there is to do is to tell Dagster.

A run is lost when

- its status is STARTED: what only starts or is being cancelled is given up by run_monitoring (dagster.yaml),
  and what is queued has no process;
- the process that its newest engine event with a pid names is gone. One of that pid that began after the
  event is another one, for pids are given away again, and start anew with a boot or a container;
- it is still STARTED when it is read again after that: its process may have ended well in between.

A run without such an event is not lost: it has only just started. Should a live run be taken for a lost one
(its container hides its pid, or the clock was put forward), it works on, and the next run waits for its
leases.
"""

import dagster as dg
import psutil


@dg.sensor(
    name="lost_runs",
    minimum_interval_seconds=60,
    # It starts nothing and ends nothing, so it needs nobody to switch it on.
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Marks runs as failed whose process is gone (reboot, crash, kill -9), so that neither the "
    "queue nor the schedule waits for them. It never starts a run and never ends a process.",
)
def lost_runs_sensor(context: dg.SensorEvaluationContext) -> dg.SkipReason:
    """One tick: which runs were lost since the last one."""
    lost = report_lost_runs(context.instance)
    return dg.SkipReason(f"marked as failed: {', '.join(lost)}" if lost else "no run is lost")


def report_lost_runs(instance: dg.DagsterInstance) -> list[str]:
    """Mark the lost runs of this instance as failed; their ids. None where the launcher looks itself."""
    if instance.run_launcher.supports_check_run_worker_health:
        return []
    started = dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])
    return [run.run_id for run in instance.get_runs(started) if _report_if_lost(instance, run.run_id)]


def _report_if_lost(instance: dg.DagsterInstance, run_id: str) -> bool:
    if (pid := _dead_process(instance, run_id)) is None:
        return False
    run = instance.get_run_by_id(run_id)
    if run is None or run.status != dg.DagsterRunStatus.STARTED:
        return False
    instance.report_run_failed(
        run, f"Its process (pid {pid}) is gone: killed, or ended with the machine. What is complete is kept."
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
