"""Where a run stands, in memory and on the disk: resumed, saved, and at its end brought back to its best.

All processes that train together have the same state, weights and optimizer. The first one writes.
"""

import logging

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.training.checkpoint import Checkpoints, TrainingState
from eagle3_pipeline.training.group import Group
from eagle3_pipeline.training.optimizer import Optimizer
from eagle3_pipeline.training.random_state import random_state
from eagle3_pipeline.training.schedule import Schedule

logger = logging.getLogger(__name__)


class Progress:
    """The state of one run, with the weights and the optimizer that belong to it."""

    def __init__(self, checkpoints: Checkpoints, optimizer: Optimizer, group: Group) -> None:
        """Go on from the newest sound checkpoint, or stand at the start."""
        self._checkpoints = checkpoints
        self._optimizer = optimizer
        self._group = group
        self.state = self._resume()
        self._random = group.gather(random_state())

    def _resume(self) -> TrainingState:
        """The newest sound checkpoint, the same in all processes: the first one tidies up before."""
        group = self._group
        with group.first_goes_first():
            if group.is_first:
                self._checkpoints.tidy()
            at = self._checkpoints.resume(self._optimizer, group.rank) or TrainingState()
        if len(steps := set(group.gather(at.step))) > 1:
            raise DamagedFile(
                f"processes that train together found different checkpoints, of steps {sorted(steps)}. Look "
                "for errors of the disk, then start again."
            )
        return at

    def begin_again_where_batches_differ(self, schedule: Schedule) -> None:
        """Begin an epoch again that was begun with other batches: some would be taken twice or never.

        They differ where samples were mended or lost since, or another number of processes trains.
        """
        at, starts = self.state, schedule.starts
        is_same = not at.batch or at.batches == fingerprint(schedule.epochs.get(at.epoch, []))
        if at.epoch >= schedule.end or (is_same and at.step == starts[at.epoch] + at.batch):
            return
        if at.batch:
            logger.warning(
                "the samples of epoch %d are not those that its first %d batches were made of (a shard was "
                "made again since, or another number of processes trains): the epoch begins again, with the "
                "weights of now",
                at.epoch + 1,
                at.batch,
            )
        at.step, at.batch = starts[at.epoch], 0
        if self._group.is_first:
            self._checkpoints.rewind(self._optimizer, at, self._random)

    def save(self) -> None:
        """Write a checkpoint, with the random states of all processes."""
        self._random = self._group.gather(random_state())
        if self._group.is_first:
            self._checkpoints.save(self._optimizer, self.state, self._random)

    def save_best(self) -> None:
        """Keep the weights of now as the best so far."""
        if self._group.is_first:
            self._checkpoints.save_best(self._optimizer.parameters, self.state)

    def finish(self) -> TrainingState:
        """Put the best weights into the model and return the state in which they were reached.

        For the first process alone. Where they are damaged those of the end stay in it, with a warning and
        `state.lost_best`.
        """
        try:
            return self._checkpoints.load_best(self._optimizer.parameters)
        except DamagedFile as error:
            self._take_for_best(error)
            return self.state

    def secure(self) -> str:
        """Read back what later turns need, before states are deleted; returns the checkpoint's digest.

        For the first process alone. Damaged best weights are replaced by those of now. Raises DamagedFile.
        """
        try:
            self._checkpoints.verify_best()
        except DamagedFile as error:
            self._take_for_best(error)
            self._checkpoints.save_best(self._optimizer.parameters, self.state)
            self._checkpoints.save(self._optimizer, self.state, self._random)
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
