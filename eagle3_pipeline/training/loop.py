"""The training loop: steps, checkpoints, validation; the same numbers wherever it is stopped.

Of processes that train together all go through the same steps and states, each with batches of its own. The
first one writes, validates and tells; what it alone knows (a judgement, that a checkpoint is due) it shares.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Any

import torch

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.training.batches import Batch, SampleSource, Split, fill
from eagle3_pipeline.training.chance import require_above_chance
from eagle3_pipeline.training.checkpoint import Checkpoints, TrainingState
from eagle3_pipeline.training.diagnosis import explain_judgement, explain_loss
from eagle3_pipeline.training.draft import trained_parameters
from eagle3_pipeline.training.forward import Step
from eagle3_pipeline.training.group import Group
from eagle3_pipeline.training.joint_step import JointStep
from eagle3_pipeline.training.meter import Meter
from eagle3_pipeline.training.objective import Objective, rows_by_step
from eagle3_pipeline.training.optimizer import Optimizer
from eagle3_pipeline.training.plan import TrainingPlan
from eagle3_pipeline.training.progress import Progress
from eagle3_pipeline.training.reading import ReadAhead
from eagle3_pipeline.training.schedule import Schedule, StepBatches, rate_share
from eagle3_pipeline.training.validation import Judgement, judge

Emit = Callable[..., None]
IsStopping = Callable[[], bool]


class _Stopping(Exception):
    """A stop was asked for amid a validation."""


class Training:
    """One run over the epochs of a turn (all epochs where there is one), from the newest checkpoint on."""

    def __init__(
        self,
        plan: TrainingPlan,
        model: Any,
        source: SampleSource,
        split: Split,
        schedule: Schedule,
        checkpoints: Checkpoints,
        emit: Emit,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        group: Group | None = None,
        is_stopping: IsStopping = lambda: False,
    ) -> None:
        """Resume; raises DamagedFile where a later turn finds no checkpoint that it could go on from.

        `is_stopping` is asked after each step: True ends the run with a checkpoint.
        """
        self._plan = plan
        self._source = source
        self._split = split
        self._schedule = schedule
        self._emit = emit
        self._device = device
        self._group = group or Group()
        self._is_stopping = is_stopping
        self._optimizer = Optimizer(trained_parameters(model), plan)
        size = model.config.draft_vocab_size
        offsets = model.d2t if model.d2t is not None else torch.zeros(size, dtype=torch.int64)
        self._targets = (offsets.cpu() + torch.arange(size)).to(device)
        self.steps = schedule.steps
        self.progress = Progress(checkpoints, self._optimizer, self._group)
        if self.state.epoch < schedule.first:
            raise checkpoints.nothing_left(plan.turn)
        self.progress.begin_again_where_batches_differ(schedule)
        self._objective = Objective(model, plan, dtype)
        self._joint_step = JointStep(self._objective, self._optimizer, self._group, device)

    @property
    def state(self) -> TrainingState:
        """Where the run stands."""
        return self.progress.state

    @property
    def is_done(self) -> bool:
        """Whether the turn is at its end: False after a run that was stopped."""
        return self.state.stopped or self.state.epoch >= self._schedule.end

    def run(self, stop: int | None = None) -> TrainingState:
        """Train until the end, or to step `stop` without a checkpoint, as a kill would leave it (tests).

        Raises QualityError at a loss that is no number, with the batch named, and BadInput where a base draft
        is worse than chance.
        """
        at, remaining = self.state, self._remaining()
        self._emit_start()
        if (
            self._plan.base_draft is not None
            and not at.step
            and not at.validation
            and not self._judge_start()
        ):
            return at
        mine = (batch for _, steps in remaining for step in steps for batch in self._group.mine(step))
        with closing(ReadAhead(self._source, mine)) as ahead:
            for epoch, steps in remaining:
                at.batches = fingerprint(self._schedule.epochs[epoch])
                if not self._train_epoch(ahead, steps, stop) or not self._end_epoch(epoch) or at.stopped:
                    return at
        return at

    def _judge_start(self) -> bool:
        """Judge the base draft as epoch -1. It is the best so far: a training that only harms gives it back.

        No checkpoint holds this: a training that is killed before its first one judges again, and finds the
        same. False where a stop was asked for.
        """
        at, judgement = self.state, self._judge()
        if judgement is None:
            return False
        require_above_chance(judgement)
        at.best, at.best_step = judgement.acceptance_length, 0
        at.validation.append({"epoch": -1, "step": 0, **asdict(judgement)})
        self._emit("start_judged", **at.validation[-1])
        self.progress.save_best()
        return True

    def _remaining(self) -> list[tuple[int, list[StepBatches]]]:
        """The epochs of this turn that are not done, the first one from where it was left."""
        at, epochs = self.state, self._schedule.epochs
        return [
            (epoch, steps[at.batch if epoch == at.epoch else 0 :])
            for epoch, steps in epochs.items()
            if epoch >= at.epoch and not at.stopped
        ]

    def _emit_start(self) -> None:
        split = self._split
        self._emit(
            "start",
            step=self.state.step,
            steps=self.steps,
            epochs=self._schedule.total,
            parameters=sum(one.numel() for one in self._optimizer.parameters.values()),
            samples=len(split.training),
            rows=sum(split.rows[index] for index in split.training),
            held_out=len(split.validation),
            judged=len(self.state.validation),
            without_supervision=split.without_supervision,
            device=(f"{self._group.size} x " if self._group.size > 1 else "") + self._device.type,
        )

    def _train_epoch(self, ahead: ReadAhead, steps: list[StepBatches], stop: int | None) -> bool:
        """Go through `steps`; False where a stop was asked for, or `stop` is reached."""
        at, saved = self.state, time.monotonic()
        meter = Meter(at.step, self._targets)
        for left, step in zip(reversed(range(len(steps))), steps, strict=True):
            waited, started = ahead.waited, time.monotonic()
            is_due = time.monotonic() - saved >= self._plan.checkpoint_every_s
            loss, is_stopping, is_due = self._step(step, ahead, meter, is_due)
            rows = sum(self._split.rows[index] for batch in step for index in batch)
            waited = ahead.waited - waited
            at.step, at.batch, at.tokens = at.step + 1, at.batch + 1, at.tokens + rows
            at.seconds += time.monotonic() - started
            at.waited += waited
            meter.add(loss, rows, waited)
            if meter.is_due() or not left:
                values = {"step": at.step, "steps": self.steps, "epoch": at.epoch}
                self._emit("step", **values, epochs=self._schedule.total, **meter.take(self.steps))
            if stop is not None and at.step >= stop:
                return False
            if is_stopping or (is_due and left):
                self.progress.save()
                saved = time.monotonic()
            if is_stopping:
                return False
        return True

    def _step(
        self, step: StepBatches, ahead: ReadAhead, meter: Meter, is_due: bool
    ) -> tuple[float, bool, bool]:
        """One step: its loss, whether any process is to stop, whether the first one's checkpoint `is_due`."""
        group, at = self._group, self.state
        samples = [index for batch in step for index in batch]
        counts = rows_by_step(map(self._source.loss_mask, samples), self._plan.test_time_steps)
        taken = self._joint_step.gradients(step, counts, ahead, meter)
        if not taken.is_finite:
            found = [index for odd in group.gather(taken.odd) for index in odd]
            indices = dict.fromkeys(found or samples)
            self._optimizer.zero_grad()
            self.progress.save()  # nothing of this step has reached the weights
            raise QualityError(explain_loss(self._source, indices, at, taken.loss, taken.norm))
        self._optimizer.step(rate_share(at.step, self.steps, self._plan.warmup_share))
        self._optimizer.zero_grad()  # nothing of them is held while a judgement or the export takes memory
        stopping, due = group.sum([self._is_stopping(), is_due and group.is_first])
        return taken.loss, stopping > 0, due > 0

    def _end_epoch(self, epoch: int) -> bool:
        """Judge and save; False where a stop was asked for before the judgement stood."""
        at, judgement = self.state, self._judge()
        if judgement is None:
            self.progress.save()
            return False
        at.step, at.epoch, at.batch = self._schedule.starts[epoch + 1], epoch + 1, 0
        is_best = judgement.acceptance_length > at.best
        record = {"epoch": epoch, "step": at.step, **asdict(judgement)}
        at.validation.append(record)
        # Before the checkpoint: news of what was not saved is cut off at the next start, never told again.
        self._emit("epoch", epochs=self._schedule.total, is_best=is_best, **record)
        if is_best:
            at.best, at.best_step = judgement.acceptance_length, at.step
            self.progress.save_best()
        patience = self._plan.patience
        at.stopped = patience is not None and at.epochs_since_best() >= patience
        self.progress.save()
        return True

    def _judge(self) -> Judgement | None:
        """The first process's judgement, for all; None where a stop was asked for meanwhile."""
        judgement = None
        if self._group.is_first:
            with suppress(_Stopping):
                judgement = self._validate()
        return self._group.share(judgement)

    @torch.no_grad()
    def _validate(self) -> Judgement:
        def results() -> Iterator[tuple[list[Step], Batch]]:
            planned = fill(self._split, self._schedule.validation, self._schedule.batch_rows)
            with closing(ReadAhead(self._source, planned)) as ahead:
                for read in ahead:
                    if self._is_stopping():
                        raise _Stopping
                    batch = read.to(self._device)
                    steps = self._objective.steps(batch)
                    if not math.isfinite(loss := float(torch.stack([step.loss for step in steps]).sum())):
                        raise QualityError(explain_judgement(self._source, batch.indices, self.state, loss))
                    yield steps, batch

        return judge(results(), self._targets, self._plan.step_decay)
