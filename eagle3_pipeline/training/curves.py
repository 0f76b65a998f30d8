"""Curves of a finished training, from its metrics: what its pictures are drawn from."""

import json
from pathlib import Path

from eagle3_pipeline.training.events import JUDGEMENTS, MARK

Curve = dict[str, list[float]]


def validation_curve(metrics: Path) -> Curve:
    """Acceptance length on the held-out samples by step and by epochs done; a base draft's begins at 0."""
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    judged = [event for event in events if event[MARK] in JUDGEMENTS]
    return {
        "steps": [event["step"] for event in judged],
        "epochs": [event["epoch"] + 1 for event in judged],
        "acceptance_length": [round(event["acceptance_length"], 4) for event in judged],
    }
