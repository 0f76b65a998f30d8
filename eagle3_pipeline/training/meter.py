"""Numbers of a training run between two reports: loss, accuracy, speed, and the time spent waiting."""

import time
from typing import Any

import torch

from eagle3_pipeline.training.batches import Batch
from eagle3_pipeline.training.forward import Step

_REPORT_EVERY_S = 5.0


class Meter:
    """Numbers of the steps since the last report; accuracy is that of this process's batches.

    `targets` int64 `[draft]` are the target's ids of the draft's tokens.
    """

    def __init__(self, step: int, targets: torch.Tensor) -> None:
        self._step = step
        self._targets = targets
        self._clear()

    def _clear(self) -> None:
        self._since = time.monotonic()
        self._losses: list[float] = []
        self._waited = 0.0
        self._tokens = 0
        self._right: torch.Tensor | None = None
        self._there: torch.Tensor | None = None

    def see(self, steps: list[Step], batch: Batch) -> None:
        """Count the proposals of one batch that equal its text. Nothing waits for the device."""
        right = torch.stack(
            [
                (self._targets[step.proposals] == batch.labels[step.rows + k]).sum()
                for k, step in enumerate(steps)
            ]
        )
        there = torch.tensor([len(step.rows) for step in steps])
        self._right = right if self._right is None else self._right + right
        self._there = there if self._there is None else self._there + there

    def add(self, loss: float, tokens: int, waited: float) -> None:
        """Count one step of all processes."""
        self._step += 1
        self._losses.append(loss)
        self._waited += waited
        self._tokens += tokens

    def is_due(self) -> bool:
        return time.monotonic() - self._since >= _REPORT_EVERY_S

    def take(self, steps: int) -> dict[str, Any]:
        """The report, and a new start. `seconds_left` is without validation."""
        elapsed = max(time.monotonic() - self._since, 1e-9)
        report = {
            "loss": sum(self._losses) / len(self._losses),
            "accuracy": self._accuracy(),
            "tokens_per_second": self._tokens / elapsed,
            "waited_s": round(self._waited, 3),
            "seconds_left": (steps - self._step) * elapsed / len(self._losses),
        }
        self._clear()
        return report

    def _accuracy(self) -> list[float]:
        if self._right is None or self._there is None:  # this process had no batch of its own
            return []
        return (self._right.cpu() / self._there.clamp_min(1)).tolist()
