"""The sensor that shows in the web UI which vLLM servers run and who holds which GPUs; it starts nothing."""

import dagster as dg

from eagle3_pipeline.serving.overview import overview


@dg.sensor(
    name="servers",
    minimum_interval_seconds=30,
    # It only looks, so it needs nobody to switch it on.
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Shows the vLLM servers of this machine: state, GPUs, users, since when, when each stops by "
    "itself; and who holds which GPUs. The text is that of the latest tick. It never starts a run.",
)
def servers_sensor() -> dg.SkipReason:
    """One tick: what `eagle3 server status` says."""
    return dg.SkipReason(overview())
