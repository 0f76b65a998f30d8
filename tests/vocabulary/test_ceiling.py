"""The acceptance length that a vocabulary allows, held against the walk of validation."""

from collections import Counter

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.training.validation import walk
from eagle3_pipeline.vocabulary.ceiling import ceiling, compare_sizes, sizes_to_compare
from eagle3_pipeline.vocabulary.selection import select_tokens

_SIZE = 6


def _vocabulary(*tokens: int) -> torch.Tensor:
    t2d = torch.zeros(_SIZE, dtype=torch.bool)
    t2d[list(tokens)] = True
    return t2d


def _walked(replies: list[list[int]], has: torch.Tensor, speculative_tokens: int) -> tuple[int, int]:
    """Drafts and accepted tokens of a draft that is right where it can be, by the walk of validation."""
    right, runs = [], []
    for number, reply in enumerate(replies):
        labels = has[torch.tensor(reply)][1:].tolist()
        for row in range(len(labels)):
            ahead = labels[row : row + speculative_tokens]
            right.append(ahead + [False] * (speculative_tokens - len(ahead)))
            runs.append(number)
    if not right:
        return 0, 0
    drafts, counts = walk(torch.tensor(right), torch.tensor(runs))
    return drafts, sum(counts)


def test_the_worked_example_of_the_module() -> None:
    found = ceiling([numpy.array([0, 1, 5, 2, 3, 4, 1], dtype=numpy.int32)], _vocabulary(0, 1, 2, 3, 4), 2)
    assert (found.drafts, found.accepted) == (3, 4)
    assert found.acceptance_length == pytest.approx(2.3333, abs=1e-4)
    assert found.coverage == pytest.approx(6 / 7)


@given(
    st.lists(st.lists(st.integers(0, _SIZE - 1), min_size=1, max_size=20), max_size=4),
    st.sets(st.integers(0, _SIZE - 1)),
    st.integers(1, 4),
)
@settings(deadline=None)
def test_it_counts_what_the_walk_of_validation_counts_for_a_draft_that_is_right_where_it_can_be(
    replies: list[list[int]], tokens: set[int], speculative_tokens: int
) -> None:
    has = _vocabulary(*tokens)
    found = ceiling([numpy.array(one, dtype=numpy.int32) for one in replies], has, speculative_tokens)
    assert (found.drafts, found.accepted) == _walked(replies, has, speculative_tokens)
    assert 1 <= found.acceptance_length <= 1 + speculative_tokens
    assert found.tokens == sum(map(len, replies))


def test_the_whole_vocabulary_reaches_one_more_than_the_speculated_tokens() -> None:
    reply = numpy.zeros(1 + 4 * 100, dtype=numpy.int32)
    assert ceiling([reply], _vocabulary(0), 3).acceptance_length == 4


@pytest.mark.parametrize(
    ("draft_tokens", "known", "sizes"),
    [
        (4096, 7041, [512, 1024, 2048, 4096, 7041]),
        (32000, 61234, [4096, 8192, 16384, 32000, 32768, 61234]),
        (32000, 7041, [4096, 7041, 32000]),
        (8, 3, [1, 2, 3, 8]),
        (4096, 4096, [512, 1024, 2048, 4096]),
    ],
)
def test_sizes_are_powers_of_two_around_the_draft_s_own_up_to_all_tokens_that_were_seen(
    draft_tokens: int, known: int, sizes: list[int]
) -> None:
    assert sizes_to_compare(draft_tokens, known) == sizes


def test_a_larger_vocabulary_never_allows_less() -> None:
    generator = numpy.random.default_rng(0)
    replies = [(generator.zipf(1.3, 300) % 500).astype(numpy.int32) for _ in range(8)]
    counts: Counter[int] = Counter()
    for reply in replies[:4]:
        counts.update(reply.tolist())
    _, own = select_tokens(counts, 64, 500, [499, 498])
    rows = compare_sizes(counts, [499, 498], replies[4:], own, 3)
    assert [row["draft_tokens"] for row in rows] == sizes_to_compare(64, len({*counts, 498, 499}))
    for column in ("coverage", "best_acceptance_length"):
        values = [row[column] for row in rows]
        assert values == sorted(values)
        assert values[0] < values[-1]
