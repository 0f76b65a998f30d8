"""Rows of local .jsonl, .json, .parquet and .csv files."""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.prompts.parsing import is_some, media_columns, needed_columns

_PARQUET_ROWS_AT_ONCE = 500  # with their images: some 100 MB
_LONGEST_CSV_FIELD = 1 << 30  # the csv module's own limit, 128 KiB, is shorter than a pasted document


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
    """All rows of a local file, in its order; raises BadInput if it is not there or not of a known format.

    Of Parquet only the columns that prompts need are kept, and of media in columns whether there are any.
    """
    readers: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".parquet": partial(_read_parquet, column=column),
        ".csv": _read_csv,
    }
    if path.suffix not in readers:
        raise BadInput(f"{path} ends in {path.suffix or 'nothing'}, expected one of {', '.join(readers)}.")
    if not path.is_file():
        raise BadInput(f"no file {path}, which the recipe names. Paths are relative to the recipe's folder.")
    return [Row(path.name, number, value, column) for number, value in readers[path.suffix](path)]


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


def _read_parquet(path: Path, column: str | None) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = needed_columns(file.schema_arrow.names, column)
            media = media_columns(names, column)
            for batch in file.iter_batches(_PARQUET_ROWS_AT_ONCE, columns=names):
                for value in batch.to_pylist():
                    number += 1
                    yield number, value | {name: is_some(value[name]) for name in media}
    except pyarrow.ArrowException as error:
        raise BadInput(f"{path} cannot be read as Parquet: {error}.") from error


def _read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(_LONGEST_CSV_FIELD)
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        for number, value in enumerate(csv.DictReader(file), start=1):
            # The reader files surplus cells under None: such a row is broken, and its text is shown.
            yield number, str(value) if None in value else value
