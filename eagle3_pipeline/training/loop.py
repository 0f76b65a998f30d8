"""The training loop: steps, checkpoints, validation; the same numbers wherever it is stopped."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

import torch

from eagle3_pipeline.errors import DamagedFile, QualityError
from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.training.batches import Batch, SampleSource, Split, fill
from eagle3_pipeline.training.chance import chance, require_above
from eagle3_pipeline.training.checkpoint import Checkpoints, TrainingState
from eagle3_pipeline.training.draft import trained_parameters
from eagle3_pipeline.training.forward import Step, train_forward
from eagle3_pipeline.training.meter import Meter
from eagle3_pipeline.training.plan import TrainingPlan
from eagle3_pipeline.training.reading import ReadAhead
from eagle3_pipeline.training.schedule import Schedule, rate_share
from eagle3_pipeline.training.validation import Judgement, judge

logger = logging.getLogger(__name__)

# AdamW as EAGLE-3 and speculators set it: a shorter memory of squares than torch's 0.999.
_BETAS = (0.9, 0.95)

Emit = Callable[..., None]


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
    ) -> None:
        """Resume; raises DamagedFile where a later turn finds no checkpoint that it could go on from."""
        self._plan = plan
        self._model = model
        self._source = source
        self._split = split
        self._schedule = schedule
        self._checkpoints = checkpoints
        self._emit = emit
        self._device = device
        self._dtype = dtype
        self._parameters = trained_parameters(model)
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=plan.learning_rate,
            betas=_BETAS,
            weight_decay=plan.weight_decay,
            fused=True,
        )
        size = model.config.draft_vocab_size
        offsets = model.d2t if model.d2t is not None else torch.zeros(size, dtype=torch.int64)
        self._targets = (offsets.cpu() + torch.arange(size)).to(device)
        self.steps = schedule.steps
        self.state = checkpoints.resume(self._parameters, self._optimizer) or TrainingState()
        if self.state.epoch < schedule.first:
            raise checkpoints.nothing_left(plan.turn)
        self._begin_again_where_batches_differ()

    def run(self, stop: int | None = None) -> TrainingState:
        """Train until the end, or to step `stop` without a checkpoint, as a kill would leave it (tests).

        Raises QualityError at a loss that is no number, with the batch named, and BadInput where a base draft
        is no better than chance.
        """
        at, remaining = self.state, self._remaining()
        self._emit_start()
        if self._plan.base_draft is not None and not at.step and not at.validation:
            self._judge_start()
        ahead = ReadAhead(self._source, (batch for _, batches in remaining for batch in batches))
        with closing(ahead):
            for epoch, batches in remaining:
                at.batches = fingerprint(self._schedule.epochs[epoch])
                if not self._train_epoch(ahead, len(batches), stop):
                    return at
                self._end_epoch(epoch)
        return at

    def _judge_start(self) -> None:
        """Judge the base draft as epoch -1. It is the best so far: a training that only harms gives it back.

        No checkpoint holds this: a training that is killed before its first one judges again, and finds the
        same.
        """
        at, judgement = self.state, self._validate()
        by_chance = chance(self._source, self._schedule.validation)
        require_above(by_chance, judgement.accuracy_by_position[0])
        at.best, at.best_step = judgement.acceptance_length, 0
        at.validation.append({"epoch": -1, "step": 0, **asdict(judgement)})
        self._emit("start_judged", chance=by_chance, **at.validation[-1])
        self._checkpoints.save_best(self._parameters, at)

    def _begin_again_where_batches_differ(self) -> None:
        """Samples were mended or lost since: batches counted in other ones would be taken twice or never."""
        at = self.state
        if not at.batch or at.batches == fingerprint(self._schedule.epochs.get(at.epoch, [])):
            return
        logger.warning(
            "the samples of epoch %d are not those that its first %d batches were made of (a shard was made "
            "again since): the epoch begins again, with the weights of now",
            at.epoch + 1,
            at.batch,
        )
        at.step, at.batch = self._schedule.starts[at.epoch], 0
        self._checkpoints.rewind(self._parameters, self._optimizer, at)

    def _remaining(self) -> list[tuple[int, list[tuple[int, ...]]]]:
        """The epochs of this turn that are not done, the first one from where it was left."""
        at, epochs = self.state, self._schedule.epochs
        return [
            (epoch, batches[at.batch if epoch == at.epoch else 0 :])
            for epoch, batches in epochs.items()
            if epoch >= at.epoch
        ]

    def _emit_start(self) -> None:
        split = self._split
        self._emit(
            "start",
            step=self.state.step,
            steps=self.steps,
            epochs=self._schedule.total,
            parameters=sum(one.numel() for one in self._parameters.values()),
            samples=len(split.training),
            rows=sum(split.rows[index] for index in split.training),
            held_out=len(split.validation),
            without_supervision=split.without_supervision,
            device=str(self._device),
        )

    def _train_epoch(self, ahead: ReadAhead, batches: int, stop: int | None) -> bool:
        """The next `batches` batches; False where `stop` is reached."""
        at, saved = self.state, time.monotonic()
        meter = Meter(at.step)
        for left in reversed(range(batches)):
            waited, started = ahead.waited, time.monotonic()
            batch = next(ahead).to(self._device)
            waited = ahead.waited - waited
            loss, steps = self._step(batch)
            at.step, at.batch, at.tokens = at.step + 1, at.batch + 1, at.tokens + len(batch.tokens)
            at.seconds += time.monotonic() - started
            at.waited += waited
            meter.add(loss, steps, batch, self._targets, waited)
            if meter.is_due() or (not left and at.epoch + 1 == self._schedule.end):
                values = {"step": at.step, "steps": self.steps, "epoch": at.epoch}
                self._emit("step", **values, epochs=self._schedule.total, **meter.take(self.steps))
            if stop is not None and at.step >= stop:
                return False
            if left and time.monotonic() - saved >= self._plan.checkpoint_every_s:
                self._checkpoints.save(self._parameters, self._optimizer, at)
                saved = time.monotonic()
        return True

    def finish(self) -> TrainingState:
        """Put the best weights into the model and return the state in which they were reached.

        Where they are damaged those of the end stay in it, with a warning and `state.lost_best`.
        """
        try:
            return self._checkpoints.load_best(self._parameters)
        except DamagedFile as error:
            self._take_for_best(error)
            return self.state

    def secure(self) -> str:
        """Read back what later turns need, before states are deleted; returns the checkpoint's digest.

        Damaged best weights are replaced by those of now. Raises DamagedFile.
        """
        try:
            self._checkpoints.verify_best()
        except DamagedFile as error:
            self._take_for_best(error)
            self._checkpoints.save_best(self._parameters, self.state)
            self._checkpoints.save(self._parameters, self._optimizer, self.state)
        return self._checkpoints.digest(self.state)

    def _take_for_best(self, error: DamagedFile) -> None:
        at = self.state
        length = at.validation[-1]["acceptance_length"]
        logger.warning(
            "%s. So the best weights, of step %d and acceptance length %.3f, are lost: the newest ones, of "
            "step %d and %.3f, take their place",
            *(error, at.best_step, at.best, at.step, length),
        )
        at.best, at.best_step, at.lost_best = length, at.step, True

    def _step(self, batch: Batch) -> tuple[float, list[Step]]:
        plan = self._plan
        for group in self._optimizer.param_groups:
            group["lr"] = plan.learning_rate * rate_share(self.state.step, self.steps, plan.warmup_share)
        self._optimizer.zero_grad(set_to_none=True)
        steps = train_forward(self._model, batch, plan.test_time_steps, self._dtype)
        loss = torch.stack([plan.step_decay**k * step.mean for k, step in enumerate(steps)]).sum()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise QualityError(self._explain_loss(value, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(list(self._parameters.values()), plan.max_gradient_norm)
        if not math.isfinite(float(norm)):
            raise QualityError(self._explain_loss(value, batch, f"gradients of norm {float(norm)} at "))
        self._optimizer.step()
        return value, steps

    def _explain_loss(self, value: float, batch: Batch, what: str = "") -> str:
        names = [self._source.name(index) for index in batch.indices]
        damaged = [
            name
            for name, index in zip(names, batch.indices, strict=True)
            if not _is_finite(self._source, index)
        ]
        cause = (
            f"its states are not finite in {', '.join(damaged)}" if damaged else "its states are all finite"
        )
        at = self.state
        return (
            f"{what}loss {value} at step {at.step + 1} (epoch {at.epoch + 1}, batch {at.batch + 1}: samples "
            f"{', '.join(names)}), expected a finite number; {cause}. "
            "Weights up to the last checkpoint are kept. "
            f"{'Make their shard again' if damaged else 'Lower training.learning_rate'}, then start again."
        )

    def _end_epoch(self, epoch: int) -> None:
        at = self.state
        at.step, at.epoch, at.batch = self._schedule.starts[epoch + 1], epoch + 1, 0
        judgement = self._validate()
        is_best = judgement.acceptance_length > at.best
        record = {"epoch": epoch, "step": at.step, **asdict(judgement)}
        at.validation.append(record)
        # Before the checkpoint: news of what was not saved is cut off at the next start, never told again.
        self._emit("epoch", epochs=self._schedule.total, is_best=is_best, **record)
        if is_best:
            at.best, at.best_step = judgement.acceptance_length, at.step
            self._checkpoints.save_best(self._parameters, at)
        self._checkpoints.save(self._parameters, self._optimizer, at)

    @torch.no_grad()
    def _validate(self) -> Judgement:
        plan = self._plan

        def results() -> Iterator[tuple[list[Step], Batch]]:
            planned = fill(self._split, self._schedule.validation, plan.tokens_per_step)
            with closing(ReadAhead(self._source, planned)) as ahead:
                for read in ahead:
                    batch = read.to(self._device)
                    yield train_forward(self._model, batch, plan.test_time_steps, self._dtype), batch

        return judge(results(), self._targets, plan.step_decay)


def _is_finite(source: SampleSource, index: int) -> bool:
    return bool(source.read(index)["hidden_states"].float().isfinite().all())
