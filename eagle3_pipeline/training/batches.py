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
what follows the end of the turn: nothing is served there. The label of a sample that judges is what the
target takes for likeliest there (judging_source.py), in a greedy reply the same. At test-time-training step
k, row r proposes the label of row r + k. Rows that are not supervised only serve as context: keys and values
of the attention.
(speculators' shift_batch pairs the same tensors; it also supervises row 5, and in later steps rows
before row 2.)

Rows of several samples are laid end to end, without padding: attention runs within each sample.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from eagle3_pipeline.errors import DamagedFile, MissingInput, QualityError
from eagle3_pipeline.samples.sample import prompt_id_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Completions of one token are rare, and the extraction skips samples whose completion it cuts away whole.
_MOST_WITHOUT_SUPERVISION = 0.1


class SampleSource(Protocol):
    """All samples of a run, read at random; masks are cheap, states are read on demand."""

    def __len__(self) -> int: ...

    def loss_mask(self, index: int) -> "torch.Tensor":
        """The mask of one sample, `[tokens]`."""

    def prefetch(self, indices: Sequence[int]) -> None:
        """Have the states of these samples fetched from the disk, to be read soon."""

    def read(self, index: int) -> "Mapping[str, torch.Tensor]":
        """hidden_states `[tokens, layers, hidden]`, token_ids and loss_mask `[tokens]` of one sample.

        Maybe also `choices` `[S]`, labels of its supervised rows that take the place of the text's.
        """

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
        labels.append(sample["choices"] if "choices" in sample else ids[at + 2])
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


def split_samples(source: SampleSource, judges: Collection[str]) -> Split:
    """The split of samples that are all there; `judges` are ids of prompts. Raises what `hold_out` raises.

    Raises DamagedFile for a mask that supervises a prompt.
    """
    rows: dict[int, int] = {}
    for index in range(len(source)):
        mask = source.loss_mask(index)
        require_prompt(source.name(index), mask)
        if len(supervised_rows(mask)):
            rows[index] = len(mask) - 1
    names = {index: source.name(index) for index in rows}
    return hold_out([list(rows)], rows, len(source) - len(rows), of_prompts(names, judges))


def require_prompt(name: str, loss_mask: "torch.Tensor") -> None:
    """Raise DamagedFile where all of a sample is supervised: the target did not write its prompt."""
    if len(loss_mask) and bool(loss_mask.all()):
        raise DamagedFile(
            f"the loss mask of {name} has a one for each of its {len(loss_mask)} tokens, expected zeros for "
            "the prompt: the draft would learn to write prompts. Make its shard again: delete the manifest "
            "of the shard and materialise hidden_state_shards."
        )


def of_prompts(names: Mapping[int, str], prompts: Collection[str]) -> set[int]:
    """The numbers of the samples, of any turn, that are replies to these prompts; `names` are sample ids."""
    wanted = set(prompts)
    return {number for number, name in names.items() if prompt_id_of(name) in wanted}


def hold_out(
    waves: Sequence[Sequence[int]], rows: dict[int, int], dropped: int, judges: Collection[int]
) -> Split:
    """Set the samples `judges` aside; `dropped` others than those in `rows` have no token to propose.

    Raises QualityError where too many are dropped, and MissingInput where none is left that judges or trains.
    """
    total = len(rows) + dropped
    if dropped:
        what = (
            f"{dropped} of {total} samples have no supervised token (the completion is cut away or shorter "
            "than 2 tokens)"
        )
        if dropped > _MOST_WITHOUT_SUPERVISION * total:
            raise QualityError(
                f"{what}, at most {_MOST_WITHOUT_SUPERVISION:.0%} are tolerated. Raise "
                "extraction.max_sample_tokens, or look at the completions in synthetic_samples."
            )
        logger.warning("%s: dropped", what)
    held_out = set(judges)
    validation = tuple(sorted(held_out & rows.keys()))
    training = tuple(tuple(index for index in wave if index not in held_out) for wave in waves)
    if not validation or not any(training):
        raise MissingInput(
            f"of {len(rows)} samples with a token to learn from {len(validation)} judge and "
            f"{sum(map(len, training))} train, expected at least one of each. Those that judge are replies "
            "to the first prompts.validation prompts: look at their verdicts in synthetic_samples of the "
            "first shard, at what is quarantined there, or change prompts.validation."
        )
    return Split(training, validation, rows, dropped)


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
