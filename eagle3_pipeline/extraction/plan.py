"""Which samples of a shard are extracted, and which are skipped and why. Needs no torch."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from eagle3_pipeline.samples.sample import Sample


@dataclass(frozen=True)
class PlannedSample:
    """A sample as it is extracted: cut to the longest length, `token_ids` and `loss_mask` [tokens]."""

    sample_id: str
    token_ids: list[int]
    loss_mask: list[int]
    is_greedy: bool = False
    """Whether the target took its likeliest token each time."""


@dataclass(frozen=True)
class ShardPlan:
    """The samples of one shard that train, in their order, and the number skipped by reason."""

    samples: list[PlannedSample]
    skipped: dict[str, int] = field(default_factory=dict)


def plan_shard(
    samples: Iterable[Sample], *, train_truncated: bool, longest: int, without_last: bool = False
) -> ShardPlan:
    """Take the samples that train, cut to `longest` tokens.

    States are causal, so those of the first tokens are the same with and without the rest. A sample
    whose whole completion is cut away has nothing to train on and is skipped as `completion_cut_off`.
    `without_last` leaves out the last token, which a server that captures while it generates never reads.
    """
    planned: list[PlannedSample] = []
    skipped: Counter[str] = Counter()
    for sample in samples:
        if not sample.trains(train_truncated):
            skipped[sample.verdict] += 1
            continue
        tokens = min(longest, len(sample.token_ids) - without_last)
        mask = sample.loss_mask[:tokens]
        if not any(mask):
            skipped["completion_cut_off"] += 1
            continue
        is_greedy = sample.sampling.get("temperature") == 0
        planned.append(PlannedSample(sample.sample_id, sample.token_ids[:tokens], mask, is_greedy))
    return ShardPlan(planned, dict(skipped))
