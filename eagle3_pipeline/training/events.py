"""What the training process tells its parent: one JSON object a line on stdout; anything else is only text.

    {"event": "start", "step": 0, "steps": 210, "epochs": 3, "parameters": 7448256, "samples": 380, ...}
    {"event": "start_judged", "epoch": -1, "step": 0, ...as an epoch, where there is a base draft...}
    {"event": "step", "step": 12, "steps": 210, "epoch": 0, "loss": 7.1, "accuracy": [0.21, ...], ...}
    {"event": "epoch", "epoch": 0, "loss": 5.9, "acceptance_length": 1.31, ...}
    {"event": "done", ...facts...}
    {"event": "failed", "error": "DamagedFile", "message": "..."}

A step event speaks of the steps since the one before it. Whoever listens to train_draft hears all but the
last two; in a sweep each has the name of its `alternative`, which ends with

    {"event": "alternative", "alternative": "low", "number": 2, "of": 5, "acceptance_length": 1.8, ...}
"""

import json
import sys
from collections.abc import Callable
from typing import Any, TextIO

from eagle3_pipeline import errors
from eagle3_pipeline.duration import in_words
from eagle3_pipeline.errors import Eagle3Error

MARK = "event"
JUDGEMENTS = ("start_judged", "epoch")
"""Kinds of events that speak of the held-out samples."""

Listener = Callable[[dict[str, Any]], None]


def emit(kind: str, stream: TextIO | None = None, **values: Any) -> None:
    """Write one event and flush it."""
    line = json.dumps({MARK: kind, **values}, allow_nan=False)
    out = stream or sys.stdout
    out.write(line + "\n")
    out.flush()


def parse(line: str) -> dict[str, Any] | None:
    """The event in a line, or None where it is text of a library."""
    if not line.startswith('{"' + MARK):
        return None
    try:
        value: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return value


def error_of(event: dict[str, Any]) -> Eagle3Error:
    """The error that a `failed` event names."""
    kind = getattr(errors, str(event.get("error")), Eagle3Error)
    if not (isinstance(kind, type) and issubclass(kind, Eagle3Error)):
        kind = Eagle3Error
    return kind(str(event.get("message")))


def describe(event: dict[str, Any]) -> str | None:
    """An event as one line for a person; None where it says nothing new."""
    kind = event[MARK]
    if kind == "start":
        resumed = f", resumed at step {event['step']:,}" if event["step"] else ""
        return (
            f"training {event['parameters']:,} parameters on {event['samples']:,} samples ({event['rows']:,} "
            f"tokens), {event['held_out']:,} held out, {event['epochs']} epochs, {event['steps']:,} steps on "
            f"{event['device']}{resumed}"
        )
    if kind == "step":
        return (
            f"step {event['step']:,}/{event['steps']:,}, epoch {event['epoch'] + 1}/{event['epochs']}: loss "
            f"{event['loss']:.3f}, accuracy {_percent(event['accuracy'])}, "
            f"{event['tokens_per_second']:,.0f} tokens/s, {in_words(event['seconds_left'])} left"
        )
    if kind == "start_judged":
        return (
            f"base draft on held-out samples: loss {event['loss']:.3f}, acceptance length "
            f"{event['acceptance_length']:.3f}, accuracy {_percent(event['accuracy_by_position'])}; always "
            f"the most frequent token would be right in {_percent([event['chance']])}"
        )
    if kind == "epoch":
        best = " (best so far)" if event["is_best"] else ""
        return (
            f"epoch {event['epoch'] + 1}/{event['epochs']} on held-out samples: loss {event['loss']:.3f}, "
            f"acceptance length {event['acceptance_length']:.3f}{best}, accuracy "
            f"{_percent(event['accuracy_by_position'])}"
        )
    if kind == "alternative":
        name = f"alternative {event['alternative']} ({event['number']} of {event['of']})"
        if event["failed"]:
            return f"{name} failed: {event['failed']}"
        return (
            f"{name}: acceptance length {event['acceptance_length']:.3f}, loss {event['loss']:.3f}, "
            f"{event['steps']:,} steps in {in_words(event['seconds'])}"
        )
    return None


def _percent(shares: list[float]) -> str:
    return " / ".join(f"{100 * share:.1f}" for share in shares) + " %"
