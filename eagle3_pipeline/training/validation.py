"""How good the draft is on held-out samples, counted as serving counts.

A proposal is right where it is the target's own likeliest token, over its whole vocabulary: the labels of
samples that judge are that (judging_source.py). A token that the draft's vocabulary lacks is never proposed.

The walk: stand at the first token that the target wrote; the draft proposes K tokens; the run of them that
is right is accepted and the target adds one token of its own; stand there, and so on. So the
acceptance length is 1 + the sum of the acceptance by position, as in vLLM's counters.

    text        a b c d e f g         K = 2
    right       at a: b yes, c no  -> stand at c (b accepted, c by the target)
                at c: d yes, e yes -> stand at f
                at f: g no         -> end             3 walks, 3 accepted: length 2.0

Averaging over all positions instead flatters the draft, since serving starts again just where it failed.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_pipeline.training.batches import Batch
from eagle3_pipeline.training.forward import Step
from eagle3_pipeline.training.loss import REDUCTION_EPSILON


@dataclass(frozen=True)
class Judgement:
    """Validation of one state of the draft; K = test-time steps."""

    loss: float
    """Decayed sum of the steps' means over all rows, as in training."""
    accuracy_by_position: tuple[float, ...]
    """`[K]`: share of all supervised rows whose k-th proposal is right, given the text before."""
    acceptance_by_position: tuple[float, ...]
    """`[K]`: share of the walk's drafts whose first k + 1 tokens are all accepted."""
    acceptance_length: float
    """Tokens per step of the target, as the walk finds it: 1 + sum of acceptance_by_position."""
    rows: int
    """How many rows judge the first proposal."""
    chance: float
    """Share of the most frequent label of these rows: what always proposing it would be right in."""
    acceptance_by_tokens: tuple[float, ...]
    """`[K]`: acceptance length of the walk with k + 1 tokens a draft, which starts again at other tokens."""


def right_by_position(steps: list[Step], batch: Batch, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Which proposals equal their label, and which exist at all: two bool `[S, K]`.

    `targets` int64 `[draft]` are the target's ids of the draft's tokens.
    """
    right = torch.zeros(len(batch.labels), len(steps), dtype=torch.bool)
    there = torch.zeros_like(right)
    for k, step in enumerate(steps):
        rows = step.rows.cpu()
        right[rows, k] = (targets[step.proposals] == batch.labels[step.rows + k]).cpu()
        there[rows, k] = True
    return right, there


def walk(right: Tensor, runs: Tensor) -> tuple[int, list[int]]:
    """Drafts of the walk, and how many of them were accepted at least up to each position.

    `right` bool `[S, K]`, `runs` `[S]`. A run ends with the text, so a draft near the end accepts less.
    """
    accepted = right.to(torch.int64).cumprod(1).sum(1).tolist()
    last = [int(end) for end in torch.unique_consecutive(runs.cpu(), return_counts=True)[1].cumsum(0)]
    drafts, counts = 0, [0] * right.shape[1]
    row = 0
    for end in last:
        while row < end:
            drafts += 1
            for k in range(accepted[row]):
                counts[k] += 1
            row += accepted[row] + 1
        row = end
    return drafts, counts


def _walks(right: Tensor, runs: Tensor) -> Tensor:
    """Drafts, then accepted tokens by position, of the walks of 1 .. K tokens a draft: int64 `[K, 1 + K]`."""
    found = torch.zeros(right.shape[1], 1 + right.shape[1], dtype=torch.int64)
    for k, row in enumerate(found, 1):
        drafts, accepted = walk(right[:, :k], runs)
        row[: k + 1] = torch.tensor([drafts, *accepted])
    return found


def judge(results: Iterable[tuple[list[Step], Batch]], targets: Tensor, step_decay: float) -> Judgement:
    """Judge the draft by its steps on held-out batches."""
    sums: Tensor | None = None
    right_total: Tensor | None = None
    there_total: Tensor | None = None
    walked: Tensor | None = None
    labels: Counter[int] = Counter()
    for steps, batch in results:
        losses = torch.stack([step.loss.detach() for step in steps]).double().cpu()
        sums = losses if sums is None else sums + losses
        right, there = right_by_position(steps, batch, targets)
        right_total = right.sum(0) if right_total is None else right_total + right.sum(0)
        there_total = there.sum(0) if there_total is None else there_total + there.sum(0)
        labels.update(batch.labels.tolist())
        walks = _walks(right, batch.runs)
        walked = walks if walked is None else walked + walks
    assert right_total is not None, "split_samples holds at least one sample out"
    assert sums is not None
    assert there_total is not None
    assert walked is not None
    means = (sums / (there_total + REDUCTION_EPSILON)).tolist()
    accuracy = (right_total / there_total.clamp_min(1)).tolist()
    acceptance = [tuple(one / max(drafts, 1) for one in counts) for drafts, *counts in walked.tolist()]
    return Judgement(
        loss=sum(step_decay**k * mean for k, mean in enumerate(means)),
        accuracy_by_position=tuple(accuracy),
        acceptance_by_position=acceptance[-1],
        acceptance_length=1 + sum(acceptance[-1]),
        rows=labels.total(),
        chance=max(labels.values(), default=0) / max(labels.total(), 1),
        acceptance_by_tokens=tuple(1 + sum(shares) for shares in acceptance),
    )
