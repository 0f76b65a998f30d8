"""What Dagster does by itself: looks at servers, runs and disks; once switched on, starts what is wanted."""

from sensors.automation import automation_sensor, new_prompts_sensor
from sensors.disk import disk_sensor
from sensors.failures import failures_sensor
from sensors.lost_runs import lost_runs_sensor
from sensors.nightly import nightly_schedule
from sensors.servers import servers_sensor
from sensors.waves import waves_sensor

__all__ = [
    "automation_sensor",
    "disk_sensor",
    "failures_sensor",
    "lost_runs_sensor",
    "new_prompts_sensor",
    "nightly_schedule",
    "servers_sensor",
    "waves_sensor",
]
