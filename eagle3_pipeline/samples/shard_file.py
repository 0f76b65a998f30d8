"""One shard of samples as one Parquet file; `datasets.load_dataset("parquet", ...)` reads it as well.

Its columns are the fields of Sample: see columns.py.
"""

import itertools
import json
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from eagle3_pipeline.durable_files import fsync_file, fsync_folder
from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.samples.columns import IDS, JSON_COLUMNS, NUMBER, TEXT, sample_columns
from eagle3_pipeline.samples.sample import Sample, verdict_trains

SAMPLES_NAME = "samples.parquet"
# Rows of a group are written and read at once: 50 samples of 9,000 tokens take 20 MB as Python integers.
_GROUP_SAMPLES = 50


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write all samples of a shard, in order, atomically and durably; raises ValueError on a double id."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with pq.ParquetWriter(temporary, _schema(), compression="zstd") as file:
            rows = map(_to_row, _each_once(samples))
            while group := list(itertools.islice(rows, _GROUP_SAMPLES)):
                file.write_table(pa.Table.from_pylist(group, schema=_schema()))
        fsync_file(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def _each_once(samples: Iterable[Sample]) -> Iterator[Sample]:
    seen: set[str] = set()
    for one in samples:
        if one.sample_id in seen:
            raise ValueError(f"the sample id {one.sample_id} occurs twice: write each once")
        seen.add(one.sample_id)
        yield one


def read_samples(path: Path) -> list[Sample]:
    """All samples of a shard, in the order they were written; raises DamagedFile."""
    return list(iter_samples(path))


def iter_samples(path: Path) -> Iterator[Sample]:
    """The same one by one, with no more than a row group in memory; raises DamagedFile on the way."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                for row in file.read_row_group(number).to_pylist():
                    yield _from_row(row)
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise _damaged(path, error) from error


def trained_lengths(path: Path, train_truncated: bool) -> list[tuple[int, int]]:
    """Tokens of (prompt, prompt + completion) of each sample that trains, without reading the tokens.

    Raises DamagedFile.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        verdicts = pq.read_table(path, columns=["verdict"])["verdict"].to_pylist()
        lengths = [
            pc.list_value_length(pq.read_table(path, columns=[name])[name]).to_pylist()
            for name in ("prompt_token_ids", "completion_token_ids")
        ]
    except (OSError, pa.ArrowException, KeyError) as error:
        raise _damaged(path, error) from error
    return [
        (prompt, prompt + completion)
        for verdict, prompt, completion in zip(verdicts, *lengths, strict=True)
        if verdict_trains(verdict, train_truncated)
    ]


def trained_of_prompts(path: Path, train_truncated: bool, prompts: Collection[str]) -> int:
    """How many of the samples that train are replies to these prompts, without reading the tokens.

    Raises DamagedFile.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path, columns=["prompt_id", "verdict"]).to_pylist()
    except (OSError, pa.ArrowException, KeyError) as error:
        raise _damaged(path, error) from error
    trained = (row for row in rows if verdict_trains(row["verdict"], train_truncated))
    return sum(row["prompt_id"] in prompts for row in trained)


def _damaged(path: Path, error: Exception) -> DamagedFile:
    return DamagedFile(
        f"{path} is no file of samples ({error}). Delete the manifest beside it and make the shard again."
    )


def _to_row(sample: Sample) -> dict[str, Any]:
    texts = {name: json.dumps(getattr(sample, name), sort_keys=True) for name in JSON_COLUMNS}
    return {**sample.to_record(), **texts}


def _from_row(row: dict[str, Any]) -> Sample:
    return Sample.from_record({**row, **{name: json.loads(row[name]) for name in JSON_COLUMNS}})


def _schema() -> Any:
    import pyarrow as pa

    types = {TEXT: pa.string(), NUMBER: pa.int32(), IDS: pa.list_(pa.int32())}
    return pa.schema([pa.field(one.name, types[one.type], nullable=False) for one in sample_columns()])
