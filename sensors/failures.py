"""The sensor that tells people of failed runs, once each: on where a way to reach them is configured."""

import dagster as dg

from sensors.messages import MAIL_VARIABLE, SLACK_VARIABLE, is_configured, link, send

_LONGEST_REASON = 1_000  # characters; the rest is in the web UI


def failures_sensor() -> dg.SensorDefinition:
    """Sensor `failures` over all runs of the code location."""

    @dg.run_failure_sensor(
        name="failures",
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.RUNNING if is_configured() else dg.DefaultSensorStatus.STOPPED,
        description=f"Sends a message for each run that failed, to Slack ({SLACK_VARIABLE}) or by e-mail "
        f"({MAIL_VARIABLE}), where the daemon's environment names one.",
    )
    def failures(context: dg.RunFailureSensorContext) -> dg.SkipReason | None:
        if not is_configured():
            return dg.SkipReason(
                f"nobody is told: the environment has neither {SLACK_VARIABLE} nor {MAIL_VARIABLE}"
            )
        run = context.dagster_run
        send(f"{run.job_name} failed (run {run.run_id[:8]})", _reason(context) + link(f"runs/{run.run_id}"))
        return None

    return failures


def _reason(context: dg.RunFailureSensorContext) -> str:
    """What each failed step says; what the run says where none failed."""
    lines = []
    for event in context.get_step_failure_events():
        data = event.step_failure_data
        words = data.user_failure_data.description if data.user_failure_data else None
        said = words or (data.error.message if data.error else "")
        lines.append(f"{(event.step_key or 'a step').split('__')[-1]}: {said.strip()}")
    text = "\n".join(lines) or context.failure_event.message or "Dagster says no reason"
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."
