"""What Dagster does by itself: the schedule, once it is switched on in the UI, and a look at the servers."""

from sensors.nightly import nightly_schedule
from sensors.servers import servers_sensor

__all__ = ["nightly_schedule", "servers_sensor"]
