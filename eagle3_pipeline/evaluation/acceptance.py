"""What the server counted about drafts during one phase, and the acceptance that follows.

With K speculative tokens, each draft proposes t1 .. tK; the target keeps a prefix of them and adds one
token of its own. A worked example with K = 3:

    draft      accepted   per position      tokens gained
    a b c      a b        [1, 1, 0]         3
    d e f      -          [0, 0, 0]         1
    g h i      g          [1, 0, 0]         2
    3 drafts   3          [2, 1, 0]         6 = 3 drafts x acceptance length 2.0

    acceptance length = 1 + accepted / drafts = 1 + sum over positions of accepted at it / drafts

(vLLM's own definition, vllm/v1/spec_decode/metrics.py.)
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from eagle3_pipeline.errors import QualityError

if TYPE_CHECKING:
    from eagle3_pipeline.serving.metrics import ServerMetrics


@dataclass(frozen=True)
class AcceptanceCounts:
    """Counts of one phase, summed over all engines; those that contradict themselves are refused."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise QualityError if nothing was drafted or the counts contradict each other."""
        if self.drafts <= 0:
            raise QualityError(
                f"the server counted {self.drafts} drafts in this phase, so there is no acceptance to report "
                "(it would not be 1.0). Does the server's log show the speculative config, and were there "
                "replies of more than one token?"
            )
        positions = self.accepted_per_position
        problems = []
        if sum(positions) != self.accepted_tokens:
            problems.append(
                f"the positions {list(positions)} sum to {sum(positions)}, not to accepted_tokens"
            )
        if any(later > earlier for earlier, later in itertools.pairwise(positions)):
            problems.append(f"the positions {list(positions)} rise, but only prefixes are accepted")
        if positions and not 0 <= min(positions) <= max(positions) <= self.drafts:
            problems.append(f"the positions {list(positions)} are not between 0 and drafts")
        if not 0 <= self.accepted_tokens <= self.draft_tokens:
            problems.append("accepted_tokens is not between 0 and draft_tokens")
        if problems:
            raise QualityError(
                f"the server's counters contradict each other ({self.drafts} drafts, {self.draft_tokens} "
                f"draft tokens, {self.accepted_tokens} accepted): {'; '.join(problems)}. Either an engine is "
                "missing from the sum or the server was restarted during the measurement: measure again."
            )

    @classmethod
    def of(cls, counted: "ServerMetrics") -> Self:
        """The counts in a difference of two scrapes, each of which sums over the engines."""
        return cls(
            counted.drafts, counted.draft_tokens, counted.accepted_tokens, counted.accepted_per_position
        )

    @classmethod
    def sum(cls, counts: Iterable[Self]) -> Self:
        """The counts of several phases together: every draft weighs the same, whatever its set."""
        parts = list(counts)
        width = max((len(part.accepted_per_position) for part in parts), default=0)
        return cls(
            drafts=sum(part.drafts for part in parts),
            draft_tokens=sum(part.draft_tokens for part in parts),
            accepted_tokens=sum(part.accepted_tokens for part in parts),
            accepted_per_position=tuple(
                sum(part.accepted_per_position[k] for part in parts if k < len(part.accepted_per_position))
                for k in range(width)
            ),
        )

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """The counts that `dataclasses.asdict` wrote."""
        return cls(**{**record, "accepted_per_position": tuple(record["accepted_per_position"])})

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per step of the target: 1 (nothing accepted) to 1 + speculative tokens."""
        return 1 + self.accepted_tokens / self.drafts

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Share of all drafts of which the token at each position was accepted, `[speculative tokens]`."""
        return tuple(accepted / self.drafts for accepted in self.accepted_per_position)
