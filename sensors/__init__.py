"""What Dagster does by itself: looks at servers and runs, and the schedule, once it is switched on."""

from sensors.lost_runs import lost_runs_sensor
from sensors.nightly import nightly_schedule
from sensors.servers import servers_sensor

__all__ = ["lost_runs_sensor", "nightly_schedule", "servers_sensor"]
