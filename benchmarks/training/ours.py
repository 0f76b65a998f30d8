"""This project's training process, started and listened to as its step does it.

Its `step` events come every few seconds and speak of all that happened since the one before: reading, steps
and the events themselves. So the rate over the time between two events is that of the whole loop:

    event      start      step        step        step       epoch     done
    counted              |<--------------------------->|
"""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_pipeline.training.child import run_process
from eagle3_pipeline.training.events import MARK
from eagle3_pipeline.training.plan import TrainingPlan

Event = dict[str, Any]
Heard = tuple[float, Event]


def train(plan: TrainingPlan) -> dict[str, float]:
    """Run the plan of one epoch; its steps, tokens a second, and the share of the time that it waited.

    Raises RuntimeError where it is too short to be timed, and what the training raises.
    """
    Path(plan.folder).mkdir(parents=True)
    heard: list[Heard] = []
    facts = run_process(plan, lambda event: heard.append((time.monotonic(), event)))
    return {"steps": facts["steps"], **rate(heard)}


def rate(heard: Sequence[Heard]) -> dict[str, float]:
    """Tokens a second from the first `step` event to the last; the steps before it warm up."""
    steps = [(when, event) for when, event in heard if event[MARK] == "step"]
    if len(steps) < 2:
        raise RuntimeError(f"{len(steps)} step events, expected at least 2: take more samples")
    tokens = seconds = waited = 0.0
    for (before, _), (when, event) in itertools.pairwise(steps):
        seconds += when - before
        tokens += event["tokens_per_second"] * (when - before)
        waited += event["waited_s"]
    return {
        "tokens": round(tokens),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "waited_share": round(waited / seconds, 4),
    }
