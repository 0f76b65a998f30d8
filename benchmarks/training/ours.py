"""This project's training process, started and listened to as its step does it.

Its `step` events come every few seconds and speak of all that happened since the one before: reading, steps
and the events themselves. So the rate over the time between two events is that of the whole loop:

    event      start      step        step        step       epoch     done
    counted              |<--------------------------->|
"""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.training.workload import quiet_environment
from eagle3_pipeline.training.events import MARK, parse
from eagle3_pipeline.training.plan import TrainingPlan

Event = dict[str, Any]
Heard = tuple[float, Event]


def train(plan: TrainingPlan) -> dict[str, float]:
    """Run the plan; its steps, tokens a second, and the share of the time that it waited for states.

    Raises RuntimeError where it fails.
    """
    heard = list(listen(plan))
    done = next((event for _, event in heard if event[MARK] == "done"), None)
    if done is None:
        raise RuntimeError(f"no draft in {plan.folder}, the last event: {heard[-1:]}")
    return {"steps": done["steps"], **rate(heard)}


def listen(plan: TrainingPlan) -> Iterator[Heard]:
    """Each event with the second at which it came; the log lies in the plan's folder."""
    folder = Path(plan.folder)
    folder.mkdir(parents=True)
    plan.write(folder / "plan.json")
    command = [sys.executable, "-m", "eagle3_pipeline.training", str(folder / "plan.json")]
    with (folder / "training.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # its end would say that nobody waits any more
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **quiet_environment(plan.devices)},
        )
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                if (event := parse(line)) is not None:
                    yield time.monotonic(), event


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
