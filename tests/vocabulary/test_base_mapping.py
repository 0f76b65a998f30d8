"""A base draft's map is read whichever way it is written, and refused where its rows cannot be known."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.vocabulary.base_mapping import read_base_mapping
from eagle3_pipeline.vocabulary.mapping import verify_mapping

_VOCAB = 60
# Neighbours are both in, as in every vocabulary that is counted from text.
_TOKENS = st.sets(st.integers(0, _VOCAB - 1), min_size=2).filter(
    lambda ids: any(id_ + 1 in ids for id_ in ids)
)


def _write(folder: Path, rows: int, **maps: torch.Tensor) -> Path:
    save_file({"lm_head.weight": torch.zeros(rows, 2), **maps}, folder / "model.safetensors")
    return folder


@given(_TOKENS, st.booleans(), st.booleans(), st.sampled_from([torch.int64, torch.int32]))
@settings(max_examples=40, deadline=None)
def test_offsets_and_ids_give_the_same_map_with_and_without_t2d(
    tmp_path_factory: pytest.TempPathFactory,
    tokens: set[int],
    as_ids: bool,
    with_t2d: bool,
    dtype: torch.dtype,
) -> None:
    ids = torch.tensor(sorted(tokens))
    offsets = ids - torch.arange(len(ids))
    true = torch.zeros(_VOCAB, dtype=torch.bool)
    true[ids] = True
    maps = {"d2t": (ids if as_ids else offsets).to(dtype), **({"t2d": true} if with_t2d else {})}
    folder = _write(tmp_path_factory.mktemp("draft"), len(ids), **maps)
    d2t, t2d = read_base_mapping(folder, _VOCAB)
    assert torch.equal(d2t, offsets)
    assert torch.equal(t2d, true)
    verify_mapping(d2t, t2d, _VOCAB)


def test_t2d_decides_where_no_two_neighbours_are_in(tmp_path: Path) -> None:
    t2d = torch.zeros(10, dtype=torch.bool)
    t2d[[0, 3, 7]] = True
    read = read_base_mapping(_write(tmp_path, 3, d2t=torch.tensor([0, 2, 5]), t2d=t2d), 10)
    assert torch.equal(read[0], torch.tensor([0, 2, 5]))
    assert torch.equal(read[1], t2d)


def test_a_map_that_contradicts_its_t2d_is_refused(tmp_path: Path) -> None:
    t2d = torch.zeros(10, dtype=torch.bool)
    t2d[[1, 2, 8]] = True
    with pytest.raises(BadInput, match="expected those 3 of its t2d"):
        read_base_mapping(_write(tmp_path, 3, d2t=torch.tensor([0, 0, 5]), t2d=t2d), 10)


@pytest.mark.parametrize("size", [9, 16])
def test_a_t2d_of_another_vocabulary_is_refused(tmp_path: Path, size: int) -> None:
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[[1, 2, 8]] = True
    with pytest.raises(BadInput, match=rf"a t2d of {size} tokens, expected the target's 10"):
        read_base_mapping(_write(tmp_path, 3, d2t=torch.tensor([1, 1, 6]), t2d=t2d), 10)


@pytest.mark.parametrize(
    ("d2t", "rows", "message"),
    [
        (torch.tensor([0, 0, 5]), 4, "a d2t of 3 tokens for a head of 4 rows"),
        (torch.tensor([0.0, 0.5]), 2, "has a d2t of torch.float32"),
        (torch.tensor([0, -5]), 2, "It is a draft of another target"),
        (torch.tensor([0, 0, 90]), 3, "It is a draft of another target"),
    ],
)
def test_a_map_that_is_none_is_refused(tmp_path: Path, d2t: torch.Tensor, rows: int, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_base_mapping(_write(tmp_path, rows, d2t=d2t), 10)


def test_without_a_map_and_a_head_all_tokens_are_the_targets(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.zeros(2, 6)}, tmp_path / "model.safetensors")
    d2t, t2d = read_base_mapping(tmp_path, 10)
    verify_mapping(d2t, t2d, 10)
    assert len(d2t) == 10
