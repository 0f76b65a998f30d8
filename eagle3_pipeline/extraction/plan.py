"""Which samples of a shard are extracted, and which are skipped and why. Needs no torch."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples.extracted_form import longest_sample
from eagle3_pipeline.samples.sample import Sample
from eagle3_pipeline.samples.shard_file import SAMPLES_NAME, iter_samples

_ONE_IN = 100


@dataclass(frozen=True)
class PlannedSample:
    """A sample as it is extracted: cut to the longest length, `token_ids` and `loss_mask` [tokens]."""

    sample_id: str
    token_ids: list[int]
    loss_mask: list[int]
    is_greedy: bool = False
    """Whether the target took its likeliest token each time."""
    is_compared: bool = False
    """Whether it is captured again alone: states must not depend on what else is at the server."""


@dataclass(frozen=True)
class ShardPlan:
    """The samples of one shard that train, in their order, and the number skipped by reason."""

    samples: list[PlannedSample]
    skipped: dict[str, int] = field(default_factory=dict)


def planned_shard(lineage: Lineage, shard: str) -> ShardPlan:
    """The plan of one shard of the recipe; raises MissingInput without its samples or the target."""
    place = lineage.synthetic_samples(shard)
    place.require()
    return plan_shard(
        iter_samples(place.folder / SAMPLES_NAME),
        train_truncated=lineage.recipe.generation.train_truncated,
        longest=longest_sample(lineage),
        without_last=lineage.recipe.extraction.while_generating,
    )


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
        first = planned[0].sample_id if planned else sample.sample_id
        compared = is_compared(first, len(planned))
        planned.append(PlannedSample(sample.sample_id, sample.token_ids[:tokens], mask, is_greedy, compared))
    return ShardPlan(planned, dict(skipped))


def is_compared(first: str, position: int) -> bool:
    """Whether the sample at a position of the shard that begins with the sample `first` is captured twice.

    One in a hundred is, the same ones in each run. Where they begin differs from shard to shard, so that
    small shards have their share.
    """
    begin = int.from_bytes(hashlib.sha256(first.encode()).digest()[:4], "big")
    return (begin + position) % _ONE_IN == 0
