import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.samples import Sample, read_samples, write_samples
from eagle3_pipeline.samples.shard_file import iter_samples, trained_lengths, trained_of_prompts


def make_sample(**changes: Any) -> Sample:
    values: dict[str, Any] = {
        "sample_id": "a-t0",
        "prompt_id": "a",
        "turn": 0,
        "prompt_token_ids": [1, 5, 6],
        "completion_token_ids": [7, 8, 9, 2],
        "finish_reason": "stop",
        "content": "fine – thanks",
        "reasoning": "",
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
        "sampling": {"temperature": 0.7},
        "server": "f" * 64,
        "verdict": "good",
    }
    return Sample(**(values | changes))


def test_the_loss_mask_is_one_exactly_on_the_completion() -> None:
    sample = make_sample()
    assert sample.token_ids == [1, 5, 6, 7, 8, 9, 2]
    assert sample.loss_mask == [0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("verdict", "with_truncated", "without"),
    [("good", True, True), ("truncated", True, False), ("empty", False, False), ("degenerate", False, False)],
)
def test_only_good_and_where_wanted_truncated_samples_train(
    verdict: str, with_truncated: bool, without: bool
) -> None:
    sample = make_sample(verdict=verdict)
    assert (sample.trains(True), sample.trains(False)) == (with_truncated, without)


ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)


@settings(deadline=None, max_examples=30)
@given(rows=st.lists(st.tuples(ids, ids, st.text(st.characters(exclude_categories=["Cs"]))), max_size=5))
def test_a_shard_file_gives_back_what_was_written(rows: list[Any], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("shard") / "samples.parquet"
    samples = [
        make_sample(sample_id=f"p{n}-t0", prompt_token_ids=prompt, completion_token_ids=reply, content=text)
        for n, (prompt, reply, text) in enumerate(rows)
    ]
    write_samples(path, samples)
    assert read_samples(path) == samples


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_samples(tmp_path / name, [make_sample()])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_sample_id_is_never_written_twice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="occurs twice"):
        write_samples(tmp_path / "samples.parquet", [make_sample(), make_sample()])


def test_a_damaged_shard_file_says_so_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    write_samples(path, [make_sample()])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedFile, match="make the shard again"):
        read_samples(path)


@pytest.mark.parametrize("train_truncated", [True, False])
def test_lengths_are_known_without_reading_the_tokens(tmp_path: Path, train_truncated: bool) -> None:
    verdicts = ("good", "truncated", "empty", "refused", "good")
    samples = [
        make_sample(
            sample_id=f"a-t{turn}", prompt_id=f"p{turn}", completion_token_ids=[7] * turn, verdict=verdict
        )
        for turn, verdict in enumerate(verdicts)
    ]
    path = tmp_path / "samples.parquet"
    write_samples(path, samples)
    assert trained_lengths(path, train_truncated) == [
        (len(one.prompt_token_ids), len(one.token_ids)) for one in samples if one.trains(train_truncated)
    ]
    assert trained_of_prompts(path, train_truncated, {"p0", "p1", "p2"}) == 1 + train_truncated
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DamagedFile, match="make the shard again"):
        trained_lengths(path, train_truncated)
    with pytest.raises(DamagedFile, match="make the shard again"):
        trained_of_prompts(path, train_truncated, {"p0"})


def test_a_shard_file_loads_with_datasets(tmp_path: Path) -> None:
    from datasets import load_dataset

    path = tmp_path / "samples.parquet"
    samples = [make_sample(sample_id=f"p{number}-t0") for number in range(120)]
    write_samples(path, samples)
    loaded = load_dataset("parquet", data_files=str(path), cache_dir=str(tmp_path / "cache"), split="train")
    assert loaded["sample_id"][:] == [one.sample_id for one in samples]
    assert loaded[119]["completion_token_ids"] == [7, 8, 9, 2]
    assert json.loads(loaded[119]["usage"])["total_tokens"] == 7


def test_samples_are_read_one_group_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "samples.parquet"
    samples = [make_sample(sample_id=f"p{number}-t0") for number in range(120)]
    write_samples(path, samples)
    assert list(iter_samples(path)) == samples
    assert pq.ParquetFile(path).metadata.row_group(0).num_rows == 50
    write_samples(path, [])
    assert list(iter_samples(path)) == []
