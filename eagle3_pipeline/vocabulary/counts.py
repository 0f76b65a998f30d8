"""What the target wrote, for the draft's vocabulary: counts of what trains, and replies that are held out.

Replies count as far as their states are extracted: nothing else trains or judges.

Only completions count: the draft proposes what the target writes, never what a user types. Completions of
validation prompts are not counted, since they judge what the counts lead to.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.extraction.plan import PlannedSample, planned_shard
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples.sample import prompt_id_of

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Replies:
    """Completions of the samples that are extracted, as far as they are."""

    counts: Counter[int] = field(default_factory=Counter)
    """Occurrences of each token id in those that train."""
    held_out: "list[NDArray[numpy.int32]]" = field(default_factory=list)
    """The token ids of each that judges, `[tokens]`."""


def read_replies(lineage: Lineage) -> Replies:
    """The replies of all shards of the run; raises BadInput, DamagedFile and MissingInput."""
    vocab_size = int(lineage.target_model().require().facts["vocab_size"])
    judges = frozenset(lineage.prompts().require().facts["validation"])
    samples = (sample for shard in lineage.recipe.shards for sample in planned_shard(lineage, shard).samples)
    return gather_replies(samples, judges, vocab_size)


def gather_replies(samples: Iterable[PlannedSample], judges: Collection[str], vocab_size: int) -> Replies:
    """The replies of `samples`; those to the prompts whose ids are `judges` are held out. Raises BadInput."""
    import numpy  # here, because the code location imports this file when it loads

    replies = Replies()
    for sample in samples:
        ids = sample.token_ids[sample.loss_mask.index(1) :]
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            strange = next(token for token in ids if not 0 <= token < vocab_size)
            raise BadInput(
                f"{sample.sample_id} has the token id {strange} in its completion, but the target has "
                f"{vocab_size:,} tokens: another model wrote it. Make the samples again."
            )
        if prompt_id_of(sample.sample_id) in judges:
            replies.held_out.append(numpy.asarray(ids, dtype=numpy.int32))
        else:
            replies.counts.update(ids)
    return replies
