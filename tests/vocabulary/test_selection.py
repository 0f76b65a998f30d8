"""Which tokens get a place: properties, ties, too few, too many, and the share of what is always in."""

import logging
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.vocabulary.mapping import verify_mapping
from eagle3_pipeline.vocabulary.selection import build_mapping, select_tokens

Corpus = tuple[Counter[int], int, int, list[int]]


def _ids(d2t: torch.Tensor) -> list[int]:
    return [int(token) for token in d2t + torch.arange(len(d2t))]


@st.composite
def _corpora(draw: st.DrawFn) -> Corpus:
    size = draw(st.integers(2, 60))
    tokens = st.integers(0, size - 1)
    counts = draw(st.dictionaries(tokens, st.integers(1, 5), max_size=size))
    always = draw(st.lists(tokens, unique=True, max_size=size))
    wanted = draw(st.integers(1, size + 5))
    return Counter(counts), wanted, size, always


@given(_corpora())
@settings(deadline=None)
def test_the_map_rises_strictly_is_right_both_ways_and_keeps_the_most_frequent(corpus: Corpus) -> None:
    counts, wanted, size, always = corpus
    d2t, t2d = build_mapping(counts, wanted, size, always)
    verify_mapping(d2t, t2d, size)
    kept = set(_ids(d2t))
    assert len(d2t) == min(wanted, size)
    left_out = [counts[token] for token in counts if token not in kept]
    rarest = min((counts[token] for token in kept - set(always)), default=None)
    assert not left_out or rarest is None or max(left_out) <= rarest
    assert _ids(d2t) == _ids(build_mapping(Counter(dict(reversed(counts.items()))), wanted, size, always)[0])


@given(_corpora())
@settings(deadline=None)
def test_tokens_that_are_always_in_get_their_places_in_their_order_and_no_more_than_their_share(
    corpus: Corpus,
) -> None:
    counts, wanted, size, always = corpus
    kept = set(_ids(select_tokens(counts, wanted, size, always)[0]))
    most = min(wanted, size, 16)
    by_frequency = set(_ids(select_tokens(counts, wanted, size)[0]))
    assert len(kept - by_frequency) <= most
    assert set(always[:most]) <= kept


def test_ties_go_to_the_lower_id() -> None:
    d2t, _ = build_mapping(Counter({9: 1, 4: 1, 7: 2, 2: 1}), 3, 10)
    assert _ids(d2t) == [2, 4, 7]


def test_too_few_distinct_tokens_are_filled_up_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    d2t, _ = build_mapping(Counter({5: 3, 1: 1}), 4, 8)
    assert _ids(d2t) == [0, 1, 2, 5]
    assert "2 distinct tokens, fewer than the draft's 4" in caplog.text


def test_more_draft_tokens_than_the_target_has_are_capped_with_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    d2t, t2d = build_mapping(Counter({0: 1}), 100, 6)
    assert not d2t.any()
    assert t2d.all()
    assert "capped at the target's 6" in caplog.text


def test_a_thousand_tokens_that_are_always_in_take_an_eighth_of_the_places_the_first_ones_first() -> None:
    counts = Counter({token: 10_000 - token for token in range(5000)})
    always = list(range(8999, 7999, -1))
    kept = set(_ids(select_tokens(counts, 4096, 10_000, always)[0]))
    assert {token for token in kept if token >= 5000} == set(always[:512])
    assert kept - set(always) == set(range(4096 - 512))


def test_frequent_tokens_need_none_of_the_share_of_those_that_are_always_in() -> None:
    counts = Counter({token: 10_000 - token for token in range(5000)})
    always = [*range(1000), *range(9000, 9512)]
    kept = set(_ids(select_tokens(counts, 4096, 10_000, always)[0]))
    assert set(always) <= kept
