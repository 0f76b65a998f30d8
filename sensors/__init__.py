"""What starts runs by itself: schedules and sensors. All are stopped until switched on in the UI."""

from sensors.nightly import nightly_schedule

__all__ = ["nightly_schedule"]
