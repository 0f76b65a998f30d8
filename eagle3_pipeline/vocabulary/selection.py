"""Which tokens of the target the draft may propose: the most frequent ones, and some that are always in.

A place for a token that is rare costs one for a token that is less rare, so those that are always in get an
eighth of the places at most, or 16 where that is more. The other places go by frequency alone; a token that
is frequent as well needs none of that eighth.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# 4,096 draft tokens have room for the 256 bytes and for as many others; 256 of them for 32.
_MOST_SHARE = 8
_FEW = 16


def build_mapping(
    counts: Counter[int], draft_tokens: int, vocab_size: int, always: Sequence[int] = ()
) -> "tuple[torch.Tensor, torch.Tensor]":
    """As `select_tokens`, with a line where there are fewer tokens than wanted."""
    wanted = min(draft_tokens, vocab_size)
    if wanted < draft_tokens:
        logger.info(
            "vocabulary.draft_tokens %s is capped at the target's %s", f"{draft_tokens:,}", f"{vocab_size:,}"
        )
    if (known := len({*counts, *always})) < wanted:
        logger.warning(
            "the completions have %s distinct tokens, fewer than the draft's %s: %s tokens that never occur "
            "fill up. Lower vocabulary.draft_tokens or collect more samples.",
            f"{known:,}",
            f"{wanted:,}",
            f"{wanted - known:,}",
        )
    return select_tokens(counts, draft_tokens, vocab_size, always)


def select_tokens(
    counts: Counter[int], draft_tokens: int, vocab_size: int, always: Sequence[int] = ()
) -> "tuple[torch.Tensor, torch.Tensor]":
    """d2t int64 [draft] and t2d bool [vocab_size] of `draft_tokens` tokens, at most the target's.

    `always` are ids in the order in which they get a place whatever their count. Ties go to the lower id;
    where there are too few tokens, the lowest other ids fill up.
    """
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    wanted = min(draft_tokens, vocab_size)
    known = {*counts, *always}
    by_count = sorted(known, key=lambda token: (-counts[token], token))
    most = min(wanted, max(wanted // _MOST_SHARE, _FEW))
    earned = set(by_count[: wanted - most])
    given = set([token for token in always if token not in earned][:most])
    above = max(counts.values(), default=0) + 1
    ranked = {token: counts[token] + (above if token in given else 0) for token in known}
    d2t, t2d = build_vocab_mappings_from_distribution(ranked, wanted, vocab_size)
    return d2t, t2d
