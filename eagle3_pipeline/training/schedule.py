"""Where each step of a training stands: one learning-rate schedule over all epochs of all turns.

A step is made of as many consecutive batches as `accumulation` and the number of processes give, each of so
much fewer rows; the last step of an epoch may have fewer.

    turn        0          1          2
    epoch       0    1     2    3     4    5       two epochs per turn, counted over all turns
    planned     40   40    44   44    38   38      steps of each epoch
    starts      0    40    80   124   168  206  244

The plan is made from all samples beforehand. Where the extraction left samples out, an epoch has fewer steps
than planned, never more: with one sample fewer, filling batches in the same order ends at the same batch
or before. The next epoch then begins where it was planned to begin.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from eagle3_pipeline.training.batches import Split, plan_epoch
from eagle3_pipeline.training.plan import TrainingPlan

logger = logging.getLogger(__name__)

# Rows of a step in the mean, as a share of training.tokens_per_step, at which rates are still what they say.
_RIGHT_SHARE = (0.5, 1.5)

Batch = tuple[int, ...]
"""Samples that are packed together, as the source counts them."""
StepBatches = tuple[Batch, ...]
"""The batches of one step."""


@dataclass(frozen=True)
class Schedule:
    """The epochs of one turn, and their places among all."""

    epochs: dict[int, list[StepBatches]]
    """Steps of each epoch of this turn, with the samples that are there; rising."""
    validation: tuple[int, ...]
    """The validation samples that are there."""
    starts: tuple[int, ...]
    """Planned steps before each epoch of the training, and at the end their total."""
    batch_rows: int
    """Rows of a batch, at most (but for a single sample that is longer)."""

    @property
    def steps(self) -> int:
        """Planned steps of all turns."""
        return self.starts[-1]

    @property
    def first(self) -> int:
        """The first epoch of this turn."""
        return min(self.epochs)

    @property
    def end(self) -> int:
        """One more than the last epoch of this turn."""
        return max(self.epochs) + 1

    @property
    def total(self) -> int:
        """Epochs of all turns."""
        return len(self.starts) - 1


def make_schedule(plan: TrainingPlan, split: Split, is_there: Callable[[int], bool]) -> Schedule:
    """The schedule of `plan.turn`; `is_there` says whether a sample's states can be read."""
    waves = len(split.waves)
    per_turn = plan.epochs // plan.passes
    total = waves * plan.passes * per_turn
    group = plan.accumulation * plan.processes
    batch_rows = max(1, plan.tokens_per_step // group)

    def steps(epoch: int, is_there: Callable[[int], bool]) -> list[StepBatches]:
        wave = epoch // per_turn % waves
        batches = plan_epoch(split, batch_rows, plan.seed, epoch, wave, is_there)
        return [tuple(batches[at : at + group]) for at in range(0, len(batches), group)]

    counts = [len(steps(epoch, lambda _: True)) for epoch in range(total)]
    mine = range(plan.turn * per_turn, (plan.turn + 1) * per_turn)
    epochs = {epoch: steps(epoch, is_there) for epoch in mine}
    validation = tuple(filter(is_there, split.validation))
    taken = sum(split.rows[index] for index in split.training) * plan.passes * per_turn
    _warn_of_rows(taken / sum(counts), plan, batch_rows)
    return Schedule(epochs, validation, tuple(accumulate(counts, initial=0)), batch_rows)


def _warn_of_rows(mean: float, plan: TrainingPlan, batch_rows: int) -> None:
    low, high = (share * plan.tokens_per_step for share in _RIGHT_SHARE)
    if not low <= mean <= high:
        logger.warning(
            "a step has %.0f rows in the mean, expected about training.tokens_per_step = %d: a batch is of "
            "%d rows, a sample is never cut, and the last step of an epoch has what is left. Learning rates "
            "are for steps of that size: lower training.accumulation, or set training.tokens_per_step to "
            "what steps have",
            *(mean, plan.tokens_per_step, batch_rows),
        )


def rate_share(step: int, steps: int, warmup_share: float) -> float:
    """Learning rate of step `step` (from 0) as a share of its peak: linear warm-up, then a cosine to 0."""
    warmup = max(1, round(warmup_share * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * done))
