"""The acceptance length that no draft with a given vocabulary can exceed.

A draft never proposes a token that it does not have. The walk is that of validation (training/validation.py),
with a draft that is right at every other token; X is not in its vocabulary, K = 2:

    reply      a b X c d e f
    at a       b yes, X no          1 accepted, the target writes X
    at X       c yes, d yes         2 accepted, the target writes e
    at e       f yes                1 accepted, the end          3 drafts, 4 accepted: length 2.33

Between two such tokens m others take m // (K + 1) drafts that are accepted whole, and the target writes one
token after each; one more draft takes the rest of them, which is less than K + 1, and ends at the next X.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3_pipeline.vocabulary.selection import select_tokens

if TYPE_CHECKING:
    import numpy
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Ceiling:
    """What the best of drafts would count on some replies."""

    tokens: int
    """Of the replies."""
    covered: int
    """Those of them that are in the vocabulary."""
    drafts: int
    accepted: int

    @property
    def coverage(self) -> float:
        """Share of the replies' tokens that the draft can propose at all."""
        return self.covered / self.tokens if self.tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per step of the target, 1 to 1 + K."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


def ceiling(
    replies: "Iterable[NDArray[numpy.int32]]", t2d: "torch.Tensor", speculative_tokens: int
) -> Ceiling:
    """Walk over `replies`, `[tokens]` each, with the best draft of the vocabulary `t2d`, bool `[target]`."""
    import numpy  # here, because the code location imports this file when it loads

    has = t2d.numpy()
    tokens = covered = drafts = accepted = 0
    for reply in replies:
        inside = has[reply]
        tokens += len(reply)
        covered += int(inside.sum())
        # The target writes the first token itself, from the prompt.
        outside = numpy.flatnonzero(~inside[1:])
        ends = numpy.concatenate([[-1], outside, [max(len(reply) - 1, 0)]])
        whole, rest = numpy.divmod(numpy.diff(ends) - 1, speculative_tokens + 1)
        drafts += int(whole.sum()) + len(outside) + int(rest[-1] > 0)
        accepted += int(whole.sum()) * speculative_tokens + int(rest.sum())
    return Ceiling(tokens, covered, drafts, accepted)


def sizes_to_compare(draft_tokens: int, known_tokens: int) -> list[int]:
    """`draft_tokens`, powers of two from an eighth of it, and `known_tokens`, beyond which nothing is won."""
    powers = (1 << exponent for exponent in range(known_tokens.bit_length()))
    between = {size for size in powers if draft_tokens // 8 <= size < known_tokens}
    return sorted(between | {draft_tokens, known_tokens})


def compare_sizes(
    counts: Counter[int],
    always: Sequence[int],
    replies: "Sequence[NDArray[numpy.int32]]",
    own: "torch.Tensor",
    speculative_tokens: int,
) -> list[dict[str, Any]]:
    """The ceiling of `own`, bool `[target]`, and of other sizes that `counts` choose: a table for people."""
    rows = []
    draft_tokens = int(own.sum())
    for size in sizes_to_compare(draft_tokens, len({*counts, *always})):
        t2d = own if size == draft_tokens else select_tokens(counts, size, len(own), always)[1]
        best = ceiling(replies, t2d, speculative_tokens)
        row = {"coverage": best.coverage, "best_acceptance_length": best.acceptance_length}
        rows.append({"draft_tokens": size, **row})
    return rows
