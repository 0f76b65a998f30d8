"""The mixture: each source has its share of what is kept, and fewer prompts are a prefix of more."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.prompts.mixture import Mixture, Strand, mix_sources
from eagle3_pipeline.prompts.sources import Row
from eagle3_pipeline.recipe import Recipe

# A source: its weight, and for each of its rows whether it is kept.
_sources = st.lists(
    st.tuples(st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.0, 7.0]), st.lists(st.booleans(), max_size=25)),
    min_size=1,
    max_size=5,
)


def _mixture(sources: list[tuple[float, list[bool]]]) -> Mixture:
    return Mixture(
        [
            Strand(str(index), weight, iter([Row(str(index), n, kept) for n, kept in enumerate(rows)]))
            for index, (weight, rows) in enumerate(sources)
        ]
    )


def _select(sources: list[tuple[float, list[bool]]], count: int) -> list[Row]:
    """Rows in the order in which they were taken, until `count` are kept."""
    mixture, taken, kept = _mixture(sources), [], 0
    for row in mixture:
        taken.append(row)
        if row.value:
            mixture.keep()
            kept += 1
        if kept == count:
            break
    assert [strand.taken for strand in mixture.strands] == [
        sum(row.source == strand.name for row in taken) for strand in mixture.strands
    ]
    assert sum(strand.kept for strand in mixture.strands) == kept
    return taken


@settings(deadline=None)
@given(sources=_sources, small=st.integers(1, 30), more=st.integers(0, 100))
def test_what_is_taken_for_a_smaller_count_is_a_prefix_of_what_is_taken_for_a_larger_one(
    sources: list[tuple[float, list[bool]]], small: int, more: int
) -> None:
    taken = _select(sources, small)
    assert _select(sources, small + more)[: len(taken)] == taken


@settings(deadline=None)
@given(sources=_sources)
def test_every_row_is_taken_once_and_in_the_order_of_its_source(
    sources: list[tuple[float, list[bool]]],
) -> None:
    taken = _select(sources, 1000)
    for index, (_, rows) in enumerate(sources):
        assert [row.value for row in taken if row.source == str(index)] == rows


@settings(deadline=None)
@given(
    weights=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    count=st.integers(1, 200),
    rejected=st.integers(0, 3),
)
def test_while_all_have_rows_the_kept_are_shared_by_weight_whatever_is_rejected(
    weights: list[int], count: int, rejected: int
) -> None:
    # The first source also has `rejected` bad rows before each good one.
    sources = [
        (float(weight), ([False] * (rejected if index == 0 else 0) + [True]) * count)
        for index, weight in enumerate(weights)
    ]
    kept = Counter(row.source for row in _select(sources, count) if row.value)
    for index, weight in enumerate(weights):
        assert abs(kept[str(index)] - count * weight / sum(weights)) <= len(weights)


def test_equal_weights_take_turns_in_the_order_of_the_recipe_until_all_are_at_their_end() -> None:
    taken = _select([(1.0, [True]), (1.0, [True, False, True]), (1.0, [True] * 4)], 100)
    assert "".join(row.source for row in taken) == "012" + "112" + "22"


def _recipe(folder: Path, sources: list[dict[str, object]], seed: int) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "order",
            "target": {"path": str(folder)},
            "prompts": {"sources": sources, "count": 1, "per_shard": 1, "seed": seed},
            "extraction": {"layers": [1, 2]},
            "evaluation": {"sets": [{"name": "held_out", "path": "x"}]},
        }
    )


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=3), seed=st.integers(0, 5))
def test_the_order_holds_every_row_once_and_depends_on_seed_and_sources_only(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("order")
    sources: list[dict[str, object]] = []
    for index, size in enumerate(sizes):
        path = folder / f"{index}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{index} {row}"}) + "\n" for row in range(size)))
        sources.append({"path": str(path), "weight": index + 1})
    order = [row.value["prompt"] for row in mix_sources(_recipe(folder, sources, seed), {})]
    assert order == [row.value["prompt"] for row in mix_sources(_recipe(folder, sources, seed), {})]
    assert sorted(order) == sorted(
        f"{index} {row}" for index, size in enumerate(sizes) for row in range(size)
    )


def test_the_order_of_a_local_file_is_the_same_in_every_version(tmp_path: Path) -> None:
    """Another order would make every shard of samples anew."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(row)}) + "\n" for row in range(50)))
    for seed, numbers in {0: [20, 35, 31, 23, 7, 45], 1: [20, 21, 6, 16, 27, 36]}.items():
        rows = mix_sources(_recipe(tmp_path, [{"path": str(path)}], seed), {})
        assert [row.number for row in islice(rows, 6)] == numbers
