"""Rows as they stand in local files of four formats."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.prompts.sources import Row, read_file

_ROWS: list[dict[str, Any]] = [
    {"prompt": "Grüß Gott", "kind": "a"},
    {"prompt": 'two\nlines, "quoted"', "kind": "b"},
]


def _jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _json(path: Path, rows: list[Any]) -> None:
    path.write_text(json.dumps(rows), encoding="utf-8")


def _csv(path: Path, rows: list[Any]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _parquet(path: Path, rows: list[Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize("write", [_jsonl, _json, _csv, _parquet])
def test_each_format_gives_the_same_rows(tmp_path: Path, write: Any) -> None:
    path = tmp_path / f"rows.{write.__name__[1:]}"
    write(path, _ROWS)
    assert read_file(path, "prompt") == [
        Row(path.name, n, row, "prompt") for n, row in enumerate(_ROWS, start=1)
    ]


def test_parquet_keeps_conversations(tmp_path: Path) -> None:
    rows = [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]}]
    _parquet(tmp_path / "a.parquet", rows)
    assert [row.value for row in read_file(tmp_path / "a.parquet")] == rows


def test_of_parquet_only_what_prompts_need_is_kept_and_of_media_whether_there_are_any(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    row = {"prompt": "Hi", "ask": "Ho", "kind": "a", "answer": "never sent"}
    _parquet(path, [{**row, "image": {"bytes": b"x"}}, {**row, "image": None}])
    kept = {"prompt": "Hi", "kind": "a"}
    assert [one.value for one in read_file(path)] == [{**kept, "image": True}, {**kept, "image": False}]
    assert list(read_file(path, "ask")[0].value) == ["ask", "kind", "image"]
    assert list(read_file(path, "image")[0].value) == ["kind", "image"]
    assert read_file(path, "image")[0].value["image"] == {"bytes": b"x"}
    assert list(read_file(path, "asks")[0].value) == [*row, "image"]


def test_a_broken_line_is_a_row_of_its_own_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "1"}\n\n{"prompt": \n' + b"[" * 100_000 + b'\n\xff\n{"prompt": "6"}'
    )
    rows = read_file(path)
    assert [(row.number, type(row.value)) for row in rows] == [
        (1, dict),
        (3, str),
        (4, str),
        (5, str),
        (6, dict),
    ]
    assert rows[-1].where == "a.jsonl:6"


def test_a_csv_row_with_too_many_cells_is_a_row_without_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,kind\nHi,a\nHi,a,b\n" + "x" * 200_000 + ",a\n")
    assert [type(row.value) for row in read_file(tmp_path / "a.csv")] == [dict, str, dict]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "x", r"a\.txt ends in \.txt, expected one of \.jsonl, \.json, \.parquet, \.csv\."),
        ("a", "x", r"a ends in nothing, expected one of"),
        ("a.json", "{}\n{}", r"a\.json is not JSON: .*One object a line wants \.jsonl\."),
        ("a.json", "{}", r"a\.json holds a dict, expected a list of rows\."),
        ("a.parquet", "x", r"a\.parquet cannot be read as Parquet"),
        ("a.jsonl", None, r"no file .*a\.jsonl, which the recipe names\."),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, match=message):
        read_file(tmp_path / name)
