"""What a run prints on a terminal: one line per piece of news, without Dagster's bookkeeping."""

import logging
import sys

import dagster as dg

from eagle3_pipeline import errors

_OUR_ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type)}


class _NewsFormatter(logging.Formatter):
    """`12:03:55 prompts   400 of 400`; a failure comes with its own words, a bug with its trace."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "dagster_meta", {}) or {}
        step = (fields.get("step_key") or "run").split("__")[-1]
        # Dagster puts run id and step in front of its messages; the bare one is in the metadata.
        message = fields.get("orig_message") or record.getMessage()
        reason = _reason(fields.get("dagster_event"))
        return f"{self.formatTime(record, '%H:%M:%S')} {step:<20} {message}{reason}"


def _is_news(record: logging.LogRecord) -> bool:
    """What is worth a line: all from INFO on, and a retry, which Dagster only logs at DEBUG."""
    if record.levelno >= logging.INFO:
        return True
    event = (getattr(record, "dagster_meta", {}) or {}).get("dagster_event")
    return event is not None and event.is_step_up_for_retry


def _reason(event: dg.DagsterEvent | None) -> str:
    if event is None:
        return ""
    if event.is_step_up_for_retry:
        error = event.step_retry_data.error
        while error is not None and error.cause is not None:
            error = error.cause
        return f"\n\n{error.message.strip()}\n" if error is not None else ""
    if not event.is_step_failure:
        return ""
    data = event.step_failure_data
    if data.error is not None and data.error.cls_name == "Cancelled":  # assets/step.py
        return " The run was cancelled; what is complete is kept."
    words = data.user_failure_data.description if data.user_failure_data else None
    if words and data.error is not None and data.error.cause is not None:
        is_ours = data.error.cause.cls_name in _OUR_ERRORS
        return f"\n\n{words}\n" if is_ours else f"\n\n{data.error.cause.to_string()}\n"
    return f"\n\n{data.error.to_string()}\n" if data.error else ""


@dg.logger(description="One readable line per message; Dagster's own events are in the web UI.")
def news_logger(_: dg.InitLoggerContext) -> logging.Logger:
    """The console logger of runs that are started with resources/console.yaml."""
    logger = logging.Logger("eagle3", level=logging.DEBUG)
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(_is_news)
    handler.setFormatter(_NewsFormatter())
    logger.addHandler(handler)
    return logger
