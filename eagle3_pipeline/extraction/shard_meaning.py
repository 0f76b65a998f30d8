"""What was found in the states of one shard, of sampled and of greedy replies apart.

The prompts that judge the draft are answered greedily, all others as `generation` says. How often the
recorded token is the likeliest one follows from the sampling, and wrong states of a few replies of one kind
would not show among many of the other. So each kind has its own count, and its own verdict.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from eagle3_pipeline.extraction.head import Head
from eagle3_pipeline.extraction.meaning import Meaning
from eagle3_pipeline.extraction.plan import PlannedSample
from eagle3_pipeline.recipe.generation import Generation

_SAMPLED, _GREEDY = "sampled", "greedy"

Counts = dict[str, dict[str, float]]


class ShardMeaning:
    """A `Meaning` of each kind of reply. One thread at a time."""

    def __init__(
        self, head: Head, samples: Sequence[PlannedSample], generation: Generation, seed: int
    ) -> None:
        """`samples` are those that will be looked at; `generation` is how the sampled ones were made."""
        self._greedy = {one.sample_id for one in samples if one.is_greedy}
        sampling = {name: getattr(generation, name) for name in ("temperature", "top_p", "top_k")}
        sampled = len(samples) - len(self._greedy)
        self._of_kind = {
            _SAMPLED: Meaning(head, **sampling, samples=sampled, seed=seed),
            _GREEDY: Meaning(head, temperature=0, top_p=1, top_k=-1, samples=len(self._greedy), seed=seed),
        }

    def look(
        self, sample_id: str, token_ids: torch.Tensor, loss_mask: torch.Tensor, last_states: torch.Tensor
    ) -> None:
        """Look at some states of a sample, as `Meaning.look` does."""
        kind = _GREEDY if sample_id in self._greedy else _SAMPLED
        self._of_kind[kind].look(sample_id, token_ids, loss_mask, last_states)

    def verdict(self) -> str | None:
        """What is wrong with the states seen so far, as a sentence, or None."""
        found = ((kind, one.verdict()) for kind, one in self._of_kind.items())
        return next((f"{verdict} ({kind} replies)" for kind, verdict in found if verdict), None)

    def counts(self) -> Counts:
        """What was counted so far, by kind; `add` takes it up again in another process."""
        return {kind: one.counts() for kind, one in self._of_kind.items()}

    def add(self, counts: Mapping[str, Mapping[str, float]]) -> None:
        """Take what `counts` of an earlier process said."""
        for kind, one in counts.items():
            self._of_kind[kind].add(one)

    def facts(self) -> dict[str, Any]:
        """The facts of each kind of which states were looked at."""
        facts = {kind: one.facts() for kind, one in self._of_kind.items()}
        return {kind: one for kind, one in facts.items() if one["states"]}


def since(now: Counts, before: Counts) -> Counts:
    """What was counted between two calls of `counts`."""
    return {
        kind: {name: value - before[kind][name] for name, value in one.items()} for kind, one in now.items()
    }
