"""From samples to packed batches: alignment, split, order.

One sample of 7 tokens, of which the target wrote x3..x6 (x6 ends the turn):

    position         0    1    2    3    4    5    6
    token            x0   x1   x2   x3   x4   x5   x6
    hidden states    g0   g1   g2   g3   g4   g5   g6     fed to the draft
    last layer       y0   y1   y2   y3   y4   y5   y6     y_p gives the target's distribution of x_(p+1)
    loss mask        0    0    0    1    1    1    1

A draft at work knows the token that the target has just written and the states of the one before it,
so row r puts x_(r+1) beside g_r and proposes x_(r+2), the token that y_(r+1) speaks of:

    row              0    1    2    3    4    5
    token in         x1   x2   x3   x4   x5   x6
    states in        g0   g1   g2   g3   g4   g5
    proposes                   x4   x5   x6               label
    verifier                   y3   y4   y5
    supervised       -    -    yes  yes  yes  -

The first proposal follows x3, since the target writes x3 itself, from the prompt. Row 5 would propose
what follows the end of the turn: nothing is served there. At test-time-training step k, row r proposes the
label of row r + k. Rows that are not supervised only serve as context: keys and values of the attention.
(speculators' shift_batch pairs the same tensors; it also supervises row 5, and in later steps rows
before row 2.)

Rows of several samples are laid end to end, without padding: attention runs within each sample.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from eagle3_pipeline.errors import MissingInput

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class SampleSource(Protocol):
    """All samples of a run, read at random; masks are cheap, states are read on demand."""

    def __len__(self) -> int: ...

    def loss_mask(self, index: int) -> "torch.Tensor":
        """The mask of one sample, `[tokens]`."""

    def prefetch(self, indices: Sequence[int]) -> None:
        """Have the states of these samples fetched from the disk, to be read soon."""

    def read(self, index: int) -> "Mapping[str, torch.Tensor]":
        """hidden_states `[tokens, layers, hidden]`, token_ids and loss_mask `[tokens]` of one sample."""

    def name(self, index: int) -> str:
        """The sample's id."""


@dataclass(frozen=True)
class Batch:
    """Packed rows of several samples; R rows, S of them supervised, A aux layers, H hidden size."""

    states: "torch.Tensor"
    """`[R, A * H]`: g of each row."""
    tokens: "torch.Tensor"
    """`[R]`: the token beside it, in the target's ids."""
    lengths: tuple[int, ...]
    """Rows of each sample; their sum is R."""
    supervised: "torch.Tensor"
    """`[S]`: rising row numbers."""
    verifier: "torch.Tensor"
    """`[S, H]`: y for each supervised row."""
    labels: "torch.Tensor"
    """`[S]`: the token that the row proposes, in the target's ids."""
    runs: "torch.Tensor"
    """`[S]`: number of the uninterrupted run of supervised rows; a run lies within one sample."""
    indices: tuple[int, ...]
    """Which samples these are, as the source counts them."""

    def to(self, device: "torch.device") -> "Batch":
        """The same batch on another device."""
        names = ("states", "tokens", "supervised", "verifier", "labels", "runs")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return Batch(lengths=self.lengths, indices=self.indices, **moved)


def supervised_rows(loss_mask: "torch.Tensor") -> "torch.Tensor":
    """Row numbers, of the `tokens - 1` rows of a sample, that have a token to propose (see the module)."""
    mask = loss_mask.bool()
    return (mask[1:-1] & mask[2:]).nonzero().flatten()


def pack(source: SampleSource, indices: Sequence[int]) -> Batch:
    """Read samples and lay their rows end to end."""
    import torch

    states, tokens, lengths, supervised, verifier, labels, runs = [], [], [], [], [], [], []
    first_row = first_run = 0
    for index in indices:
        sample = source.read(index)
        rows = len(sample["token_ids"]) - 1
        ids = sample["token_ids"].to(torch.int64)
        at = supervised_rows(sample["loss_mask"])
        hidden = sample["hidden_states"]
        states.append(hidden[:-1, :-1].reshape(rows, -1))
        tokens.append(ids[1:])
        lengths.append(rows)
        supervised.append(at + first_row)
        verifier.append(hidden[at + 1, -1])
        labels.append(ids[at + 2])
        run = torch.cat([torch.zeros(1, dtype=torch.int64), (at.diff() > 1).cumsum(0)])[: len(at)]
        runs.append(run + first_run)
        first_row += rows
        first_run += int(run[-1]) + 1 if len(run) else 0
    return Batch(
        states=torch.cat(states),
        tokens=torch.cat(tokens),
        lengths=tuple(lengths),
        supervised=torch.cat(supervised),
        verifier=torch.cat(verifier),
        labels=torch.cat(labels),
        runs=torch.cat(runs),
        indices=tuple(indices),
    )


@dataclass(frozen=True)
class Split:
    """Which samples train and which judge. Samples without a supervised token are in neither."""

    waves: tuple[tuple[int, ...], ...]
    """The samples that train, by wave; one wave where all states are there at once."""
    validation: tuple[int, ...]
    rows: dict[int, int]
    """Rows of each sample that is used."""
    without_supervision: int
    """Samples dropped since no token of theirs can be proposed."""

    @property
    def training(self) -> tuple[int, ...]:
        """The samples that train, of all waves."""
        return tuple(index for wave in self.waves for index in wave)


def split_samples(source: SampleSource, validation_share: float, seed: int) -> Split:
    """The split of samples that are all there; raises MissingInput below two usable ones."""
    rows: dict[int, int] = {}
    for index in range(len(source)):
        mask = source.loss_mask(index)
        if len(supervised_rows(mask)):
            rows[index] = len(mask) - 1
    return hold_out([list(rows)], rows, len(source) - len(rows), validation_share, seed)


def hold_out(
    waves: Sequence[Sequence[int]], rows: dict[int, int], dropped: int, share: float, seed: int
) -> Split:
    """Set a fixed share of all samples in `rows` aside, at least one; `dropped` others have no use.

    They are drawn from the first wave, whose states are there first, and are at most half of it. Raises
    MissingInput where that has less than two.
    """
    import torch

    first = waves[0]
    where = "" if len(waves) == 1 else " in the first wave"
    if len(first) < 2:
        raise MissingInput(
            f"{len(first)} of {len(rows) + dropped} samples have a token to learn from{where}, expected at "
            "least 2 (one trains, one judges). "
            "Look at the completions in sample_audit, and at extraction.max_sample_tokens."
        )
    if dropped:
        logger.warning(
            "%d of %d samples have no supervised token (the completion is cut away or shorter than 2 "
            "tokens): dropped",
            dropped,
            len(rows) + dropped,
        )
    order = torch.randperm(len(first), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = min(max(1, round(share * len(rows))), len(first) // 2)
    validation = tuple(sorted(first[at] for at in order[:held_out]))
    training = tuple(sorted(first[at] for at in order[held_out:]))
    return Split((training, *map(tuple, waves[1:])), validation, rows, dropped)


def plan_epoch(
    split: Split,
    tokens_per_step: int,
    seed: int,
    epoch: int,
    wave: int = 0,
    is_there: Callable[[int], bool] = lambda _: True,
) -> list[tuple[int, ...]]:
    """The batches of one epoch: the order depends on nothing but `seed` and `epoch` (from 0).

    Samples of the wave are taken in a shuffled order until `tokens_per_step` rows are full. A sample
    that is longer is a batch of its own: cutting it would take the context away from what follows. One
    that is not there is left out, and the order of the others stays.
    """
    import torch

    samples = split.waves[wave]
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(samples), generator=generator).tolist()
    return list(fill(split, filter(is_there, (samples[at] for at in order)), tokens_per_step))


def fill(split: Split, indices: Iterable[int], tokens_per_step: int) -> Iterator[tuple[int, ...]]:
    """Group samples, in order, into batches of at most `tokens_per_step` rows."""
    batch: list[int] = []
    rows = 0
    for index in indices:
        if batch and rows + split.rows[index] > tokens_per_step:
            yield tuple(batch)
            batch, rows = [], 0
        batch.append(index)
        rows += split.rows[index]
    if batch:
        yield tuple(batch)
