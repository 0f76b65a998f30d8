"""Rows of prompt sources: local .jsonl, .json, .parquet, .csv files and streamed Hugging Face datasets."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.recipe.settings import PromptSource

_LONGEST_CSV_FIELD = 1 << 30  # the csv module's own limit, 128 KiB, is shorter than a pasted document
_SHUFFLE_BUFFER_ROWS = 10_000  # of a streamed dataset; about 50 MB of conversations


@dataclass(frozen=True)
class Row:
    """One row as it was found. `value` is a dict, or the raw text of a line that is no JSON."""

    source: str
    number: int  # counts from 1: the line of a .jsonl file, the row of the others
    value: Any
    column: str | None = None

    @property
    def where(self) -> str:
        """Where a person finds the row."""
        return f"{self.source}:{self.number}"


def read_file(path: Path, column: str | None = None) -> list[Row]:
    """All rows of a local file, in its order; raises BadInput if it is not there or not of a known format."""
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet, ".csv": _read_csv}
    if path.suffix not in readers:
        raise BadInput(f"{path} ends in {path.suffix or 'nothing'}, expected one of {', '.join(readers)}.")
    if not path.is_file():
        raise BadInput(f"no file {path}, which the recipe names. Paths are relative to the recipe's folder.")
    return [Row(path.name, number, value, column) for number, value in readers[path.suffix](path)]


def resolve_revision(source: PromptSource) -> str:
    """The commit that a dataset's revision stands for now; raises BadInput."""
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(str(source.dataset), revision=source.revision).sha
    except Exception as error:  # of the hub, its transport and its cache: some twenty classes
        raise _unreadable(source, error) from error
    return commit or source.revision


def stream_dataset(source: PromptSource, revision: str, seed: int) -> Iterator[Row]:
    """Rows of a dataset at a commit, shuffled by `seed` in a buffer while they stream; raises BadInput."""
    import datasets

    try:
        dataset = datasets.load_dataset(source.dataset, revision=revision, split=source.split, streaming=True)
    except Exception as error:
        raise _unreadable(source, error) from error
    shuffled = dataset.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER_ROWS)
    for number, value in enumerate(shuffled, start=1):
        yield Row(str(source.dataset), number, value, source.column)


def _unreadable(source: PromptSource, error: Exception) -> BadInput:
    return BadInput(
        f"dataset {source.dataset}, revision {source.revision}, split {source.split} cannot be read: "
        f"{type(error).__name__}: {error}. Check the names, the network and HF_TOKEN, or download it and "
        "give its path."
    )


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if text := line.removeprefix(b"\xef\xbb\xbf").strip():
                try:
                    yield number, json.loads(text)
                except (ValueError, RecursionError):
                    yield number, text.decode(errors="replace")


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        rows = json.loads(path.read_text("utf-8-sig"))
    except ValueError as error:
        raise BadInput(f"{path} is not JSON: {error}. One object a line wants .jsonl.") from error
    if not isinstance(rows, list):
        raise BadInput(f"{path} holds a {type(rows).__name__}, expected a list of rows.")
    yield from enumerate(rows, start=1)


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for value in batch.to_pylist():
                    number += 1
                    yield number, value
    except pyarrow.ArrowException as error:
        raise BadInput(f"{path} cannot be read as Parquet: {error}.") from error


def _read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(_LONGEST_CSV_FIELD)
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        for number, value in enumerate(csv.DictReader(file), start=1):
            # The reader files surplus cells under None: such a row is broken, and its text is shown.
            yield number, str(value) if None in value else value
