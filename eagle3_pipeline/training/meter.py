"""Numbers of a training run between two reports: loss, accuracy, speed, and the time spent waiting."""

import time
from typing import Any

import torch

from eagle3_pipeline.training.batches import Batch
from eagle3_pipeline.training.forward import Step
from eagle3_pipeline.training.validation import right_by_position

_REPORT_EVERY_S = 5.0


class Meter:
    """Numbers of the steps since the last report."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._clear()

    def _clear(self) -> None:
        self._since = time.monotonic()
        self._losses: list[float] = []
        self._waited = 0.0
        self._tokens = 0
        self._right: torch.Tensor | None = None
        self._there: torch.Tensor | None = None

    def add(self, loss: float, steps: list[Step], batch: Batch, targets: torch.Tensor, waited: float) -> None:
        right, there = right_by_position(steps, batch, targets)
        self._step += 1
        self._losses.append(loss)
        self._waited += waited
        self._tokens += len(batch.tokens)
        self._right = right.sum(0) if self._right is None else self._right + right.sum(0)
        self._there = there.sum(0) if self._there is None else self._there + there.sum(0)

    def is_due(self) -> bool:
        return time.monotonic() - self._since >= _REPORT_EVERY_S

    def take(self, steps: int) -> dict[str, Any]:
        """The report, and a new start. `seconds_left` is without validation."""
        assert self._right is not None
        assert self._there is not None
        elapsed = max(time.monotonic() - self._since, 1e-9)
        report = {
            "loss": sum(self._losses) / len(self._losses),
            "accuracy": (self._right / self._there.clamp_min(1)).tolist(),
            "tokens_per_second": self._tokens / elapsed,
            "waited_s": round(self._waited, 3),
            "seconds_left": (steps - self._step) * elapsed / len(self._losses),
        }
        self._clear()
        return report
