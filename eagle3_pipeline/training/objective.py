"""What a step minimizes: the decayed sum of the test-time steps' mean losses, over the rows of all batches.

    L = sum over k of  decay^k * (sum of the losses of step k's rows) / (their count + epsilon)

The counts are those of the whole step, so the gradients of its batches, wherever they are gone through, add
up to that of one batch with all its rows.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle3_pipeline.training.batches import Batch, supervised_rows
from eagle3_pipeline.training.draft import trained_parameters
from eagle3_pipeline.training.forward import Step, train_forward
from eagle3_pipeline.training.loss import REDUCTION_EPSILON
from eagle3_pipeline.training.plan import TrainingPlan


class Objective(torch.nn.Module):
    """The draft with its objective, as DistributedDataParallel wants it: one forward call.

    Its parameters are those that are trained. The target's own tensors are the same everywhere, and no
    business of processes that train together.
    """

    def __init__(self, model: Any, plan: TrainingPlan, dtype: torch.dtype) -> None:
        super().__init__()
        self.trained = torch.nn.ParameterList(trained_parameters(model).values())
        self._model = (model,)  # in a tuple: no submodule
        self._plan = plan
        self._dtype = dtype

    def forward(self, batch: Batch, counts: Sequence[int]) -> tuple[Tensor, list[Step]]:
        """This batch's part of the objective (scalar) and its steps; `counts` `[K]` are of the whole step."""
        steps = self.steps(batch)
        decay = self._plan.step_decay
        parts = [
            decay**k * (step.loss / (count + REDUCTION_EPSILON))
            for k, (step, count) in enumerate(zip(steps, counts, strict=True))
        ]
        return torch.stack(parts).sum(), steps

    def steps(self, batch: Batch) -> list[Step]:
        """The test-time steps of one batch."""
        plan = self._plan
        return train_forward(self._model[0], batch, plan.test_time_steps, self._dtype, plan.loss)


def rows_by_step(masks: Iterable[Tensor], steps: int) -> list[int]:
    """How many rows of samples with these loss masks propose at each test-time step.

    At step k a row does where the k rows behind it are supervised as well: runs end with their text.
    """
    counts = [0] * steps
    for mask in masks:
        rows = supervised_rows(mask)
        for k in range(steps):
            counts[k] += int((rows[k:] - rows[: len(rows) - k] == k).sum()) if k < len(rows) else 0
    return counts
