"""The gradients of one optimizer step, whose batches lie with several processes, or with one after the other.

step          b0  b1  b2  b3  b4          accumulation 3, 2 processes; the sixth batch is missing
process 0     b0      b2      b4
process 1         b1      b3              gradients are summed over processes with each one's last batch
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from eagle3_pipeline.training.batches import Batch
from eagle3_pipeline.training.group import Group, unsynchronized
from eagle3_pipeline.training.meter import Meter
from eagle3_pipeline.training.objective import Objective
from eagle3_pipeline.training.optimizer import Optimizer
from eagle3_pipeline.training.schedule import StepBatches


@dataclass(frozen=True)
class Gradients:
    """What is known of a step's gradients; they themselves lie in the parameters, clipped."""

    loss: float
    """Of the whole step."""
    norm: float
    """Before clipping."""
    odd: tuple[int, ...]
    """Samples of this process's batches whose loss is no finite number."""

    @property
    def is_finite(self) -> bool:
        """Whether the step may be taken; the same in all processes."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class JointStep:
    """Brings about the gradients that one batch of all rows of the step would have."""

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        group: Group,
        device: torch.device,
    ) -> None:
        """All processes start with the first one's parameters."""
        self._optimizer = optimizer
        self._group = group
        self._device = device
        self._module = group.synchronized(objective)

    def gradients(
        self, step: StepBatches, counts: Sequence[int], read: Iterator[Batch], meter: Meter
    ) -> Gradients:
        """Go through this process's batches of the step, which come from `read`; `meter` sees them.

        `counts` `[K]` are the rows of the whole step that propose at each test-time step. A process for which
        there is no batch goes through another's: it takes part, but adds nothing.
        """
        mine = self._group.mine(step)
        is_idle = self._group.rank >= len(step)
        # DistributedDataParallel takes the mean over processes; wanted is the sum.
        scale = 0 if is_idle else self._group.size
        self._optimizer.zero_grad()
        parts = []
        for left in reversed(range(len(mine))):
            with unsynchronized(self._module) if left else nullcontext():
                batch = next(read).to(self._device)
                loss, steps = self._module(batch, counts)
                (loss * scale).backward()
            parts.append(loss.detach())
            if not is_idle:
                meter.see(steps, batch)
        losses = torch.stack(parts).tolist()
        (loss,) = self._group.sum([0.0 if is_idle else sum(losses)])
        odd = [indices for indices, one in zip(mine, losses, strict=True) if not math.isfinite(one)]
        norm = self._optimizer.clip()
        return Gradients(loss, norm, tuple(index for indices in odd for index in indices))
