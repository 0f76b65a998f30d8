"""What Dagster does by itself: looks at servers and runs; once switched on, the schedule and the waves."""

from sensors.lost_runs import lost_runs_sensor
from sensors.nightly import nightly_schedule
from sensors.servers import servers_sensor
from sensors.waves import waves_sensor

__all__ = ["lost_runs_sensor", "nightly_schedule", "servers_sensor", "waves_sensor"]
