"""The map between the draft's tokens and the target's: properties, ties, refusals, the step itself."""

import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from eagle3_pipeline.errors import BadInput, DamagedFile, RecipeError
from eagle3_pipeline.vocabulary.mapping import (
    build_mapping,
    coverage,
    read_base_mapping,
    read_mapping,
    verify_mapping,
    write_mapping,
)


@st.composite
def _corpora(draw: st.DrawFn) -> tuple[Counter[int], int, int, frozenset[int]]:
    size = draw(st.integers(2, 60))
    tokens = st.integers(0, size - 1)
    counts = draw(st.dictionaries(tokens, st.integers(1, 5), max_size=size))
    always = draw(st.frozensets(tokens, max_size=min(3, size)))
    wanted = draw(st.integers(max(1, len(always)), size + 5))
    return Counter(counts), wanted, size, always


@given(_corpora())
@settings(deadline=None)
def test_the_map_rises_strictly_is_right_both_ways_and_keeps_the_most_frequent(
    corpus: tuple[Counter[int], int, int, frozenset[int]],
) -> None:
    counts, wanted, size, always = corpus
    d2t, t2d = build_mapping(counts, wanted, size, always)
    verify_mapping(d2t, t2d, size)
    kept = set((d2t + torch.arange(len(d2t))).tolist())
    assert len(d2t) == min(wanted, size)
    assert always <= kept
    left_out = [counts[token] for token in counts if token not in kept]
    rarest = min((counts[token] for token in kept - always), default=0)
    assert not left_out or max(left_out) <= rarest or kept == always
    reversed_order = Counter(dict(reversed(list(counts.items()))))
    again, _ = build_mapping(reversed_order, wanted, size, always)
    assert torch.equal(d2t, again)


def test_ties_go_to_the_lower_id() -> None:
    d2t, _ = build_mapping(Counter({9: 1, 4: 1, 7: 2, 2: 1}), 3, 10)
    assert (d2t + torch.arange(3)).tolist() == [2, 4, 7]


def test_too_few_distinct_tokens_are_filled_up_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    d2t, _ = build_mapping(Counter({5: 3, 1: 1}), 4, 8)
    assert (d2t + torch.arange(4)).tolist() == [0, 1, 2, 5]
    assert "2 distinct tokens, fewer than the draft's 4" in caplog.text


def test_more_draft_tokens_than_the_target_has_are_capped_with_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    d2t, t2d = build_mapping(Counter({0: 1}), 100, 6)
    assert not d2t.any()
    assert t2d.all()
    assert "capped at the target's 6" in caplog.text


def test_token_ids_of_another_model_are_refused() -> None:
    with pytest.raises(BadInput, match=r"token ids \[12\] in the completions, but the target has 10"):
        build_mapping(Counter({12: 1}), 4, 10)


def test_fewer_draft_tokens_than_control_tokens_are_refused() -> None:
    with pytest.raises(RecipeError, match="3 control tokens are always in"):
        build_mapping(Counter({0: 9}), 2, 10, frozenset({4, 5, 6}))


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        ([0, -1], [1, 0, 0], "which is not above it"),
        ([0, 2], [1, 0, 1], "leads outside"),
        ([0, 1], [1, 1, 0], "not the 2 of d2t"),
        ([0, 1], [1, 0, 1, 0], r"expected bool \[3\]"),
    ],
)
def test_a_map_that_contradicts_itself_is_refused(d2t: list[int], t2d: list[int], message: str) -> None:
    with pytest.raises(DamagedFile, match=message):
        verify_mapping(torch.tensor(d2t), torch.tensor(t2d, dtype=torch.bool), 3)


def test_a_written_map_is_read_back_and_a_cut_one_is_refused(tmp_path: Path) -> None:
    counts = Counter({3: 2, 8: 5})
    d2t, t2d = build_mapping(counts, 2, 10)
    path = tmp_path / "vocabulary.safetensors"
    write_mapping(path, d2t, t2d, counts)
    assert all(torch.equal(a, b) for a, b in zip(read_mapping(path), (d2t, t2d), strict=True))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DamagedFile, match="Materialise vocabulary_map again"):
        read_mapping(path)


def test_coverage_is_the_share_of_occurrences_not_of_tokens() -> None:
    counts = Counter({0: 90, 1: 9, 2: 1})
    _, t2d = build_mapping(counts, 1, 4)
    assert coverage(t2d, counts) == 0.9


def test_the_map_of_a_base_draft_is_kept_as_it_is(tmp_path: Path) -> None:
    d2t = torch.tensor([1, 1, 4])
    weights = {"d2t": d2t, "lm_head.weight": torch.zeros(3, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    kept, t2d = read_base_mapping(tmp_path, 10)
    verify_mapping(kept, t2d, 10)
    assert torch.equal(kept, d2t)
    with pytest.raises(BadInput, match="draft of another target"):
        read_base_mapping(tmp_path, 6)


def test_a_base_draft_without_map_needs_the_whole_vocabulary(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(5, 2)}, tmp_path / "model.safetensors")
    d2t, t2d = read_base_mapping(tmp_path, 5)
    verify_mapping(d2t, t2d, 5)
    with pytest.raises(BadInput, match="head of 5 tokens and no d2t"):
        read_base_mapping(tmp_path, 6)
