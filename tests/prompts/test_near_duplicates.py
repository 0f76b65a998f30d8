"""Near duplicates: what is found is truly similar, and what is clearly similar is found."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.prompts.near_duplicates import NearDuplicates, shingles

_sets = st.frozensets(st.integers(0, 2**64 - 1), min_size=1, max_size=40)


def _similarity(one: frozenset[int], other: frozenset[int]) -> float:
    return len(one & other) / len(one | other)


def test_shingles_are_runs_of_five_words_whatever_case_and_punctuation() -> None:
    assert shingles("One, two three: four FIVE six!") == shingles("one two three four five SIX")
    assert len(shingles("one two three four five six")) == 2
    assert len(shingles("one two three four five")) == 1
    assert shingles("hi there") != shingles("hi you")
    assert len(shingles("🙂")) == 1
    assert shingles("") == shingles("  ")


def test_characters_of_scripts_without_spaces_are_words() -> None:
    assert len(shingles("今天天气怎么样")) == 3
    assert len(shingles("Was heißt 今天?")) == 1


@settings(deadline=None)
@given(kept=st.lists(_sets, max_size=8), query=_sets, bound=st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]))
def test_what_is_found_is_the_first_above_the_bound(
    kept: list[frozenset[int]], query: frozenset[int], bound: float
) -> None:
    index = NearDuplicates(bound)
    for number, elements in enumerate(kept):
        index.add(str(number), elements)
    found = index.find(query)
    equal = [str(number) for number, elements in enumerate(kept) if elements == query]
    if found is not None:
        assert found[1] == _similarity(kept[int(found[0])], query) > bound
    if equal and bound < 1:
        assert found is not None
        assert int(found[0]) <= int(equal[0])


@settings(deadline=None)
@given(base=st.frozensets(st.integers(0, 2**64 - 1), min_size=20, max_size=60))
def test_a_set_with_one_element_changed_is_found(base: frozenset[int]) -> None:
    index = NearDuplicates(0.7)
    index.add("base", base)
    changed = base - {min(base)} | {(min(base) + 1) % 2**64}
    assert index.find(changed) is not None


@settings(deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), bound=st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9, 0.95]))
def test_the_estimate_spares_comparisons_and_changes_no_verdict(seed: int, bound: float) -> None:
    """Queries of every similarity to 30 sets; an index that compares all its candidates says the same."""
    chance = random.Random(seed)
    base = [chance.getrandbits(64) for _ in range(120)]
    index, exact = NearDuplicates(bound), NearDuplicates(bound)
    exact._fewest_agreeing = 0
    for number in range(30):
        elements = frozenset([*chance.sample(base, chance.randint(1, 120)), chance.getrandbits(64)])
        assert index.find(elements) == exact.find(elements)
        index.add(str(number), elements)
        exact.add(str(number), elements)


def test_nothing_is_above_a_bound_of_one() -> None:
    index = NearDuplicates(1.0)
    index.add("a", frozenset({1, 2}))
    assert index.find(frozenset({1, 2})) is None


@pytest.mark.parametrize(("shared", "is_found"), [(60, False), (68, False), (72, True), (90, True)])
def test_the_bound_is_exact(shared: int, is_found: bool) -> None:
    chance = random.Random(shared)
    index = NearDuplicates(0.7)
    pairs = []
    for number in range(50):
        union = [chance.getrandbits(64) for _ in range(100)]
        own = (100 - shared) // 2
        index.add(str(number), frozenset(union[: shared + own]))
        pairs.append(frozenset(union[:shared] + union[shared + own :]))
    assert [index.find(query) is not None for query in pairs] == [is_found] * 50


def test_an_instruction_shared_by_all_prompts_costs_little() -> None:
    """An index by shingle would compare millions of pairs here."""
    chance = random.Random(0)
    instruction = (
        "Read the article with care, then answer the question below it step by step, citing the passage. "
    )
    index = NearDuplicates(0.7)
    start = time.process_time()
    for number in range(2000):
        elements = shingles(instruction + " ".join(f"w{chance.randrange(5000)}" for _ in range(40)))
        assert index.find(elements) is None
        index.add(str(number), elements)
    assert time.process_time() - start < 10
