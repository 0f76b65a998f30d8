"""Where the rows of a packed batch lie: positions, runs of supervised rows, what each step proposes from.

It is counted once per batch on the CPU. A number that is asked of a GPU in the middle of a pass makes both
wait for each other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_pipeline.training.batches import Batch


@dataclass(frozen=True)
class Run:
    """Supervised rows that lie side by side in one sample: queries of the attention, and what they see.

    Query `first_query + i` stands at row `last_row - (last_query - first_query) + i`.
    """

    first_query: int
    last_query: int
    """One past the last of the run's supervised rows, as the batch counts them (0..S)."""
    first_row: int
    """The first row of the sample."""
    last_row: int
    """One past the row of the last query."""

    def row_of(self, query: int) -> int:
        """The row of one of the run's queries; of `last_query`, `last_row`."""
        return self.last_row - (self.last_query - query)


@dataclass(frozen=True)
class Geometry:
    """R rows, S of them supervised; index tensors lie on the batch's device."""

    runs: tuple[Run, ...]
    positions: Tensor
    """`[R]`: place of each row in its sample."""
    rows: tuple[Tensor, ...]
    """By test-time step, `[n]`: the supervised rows (0..S-1) that it proposes from."""


def lay_out(batch: Batch, steps: int) -> Geometry:
    """The geometry of a batch."""
    device = batch.tokens.device
    runs = batch.runs.cpu()  # one transfer, before any work of this batch is under way
    positions = torch.cat([torch.arange(length) for length in batch.lengths])
    rows = [rows_of_step(runs, step) for step in range(steps)]
    return Geometry(
        _find_runs(batch, runs),
        positions.to(device, non_blocking=True),
        tuple(one.to(device, non_blocking=True) for one in rows),
    )


def rows_of_step(runs: Tensor, step: int) -> Tensor:
    """Supervised rows whose label `step` rows further lies in the same run; `runs` is `[S]`."""
    if step == 0:
        return torch.arange(len(runs), device=runs.device)
    return (runs[step:] == runs[:-step]).nonzero().flatten()


def _find_runs(batch: Batch, runs: Tensor) -> tuple[Run, ...]:
    supervised = batch.supervised.cpu()
    ends = torch.unique_consecutive(runs, return_counts=True)[1].cumsum(0)
    last_rows = supervised[ends - 1] + 1
    sample_ends = torch.tensor(batch.lengths).cumsum(0)
    samples = torch.searchsorted(sample_ends, last_rows)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), sample_ends])[samples]
    firsts = [0, *ends.tolist()]
    places = zip(firsts, ends.tolist(), starts.tolist(), last_rows.tolist(), strict=False)
    return tuple(Run(*place) for place in places)
