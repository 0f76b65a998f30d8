"""The columns of a file of samples are the fields of a sample, each with what it means."""

import re
from dataclasses import fields
from pathlib import Path

import pyarrow.parquet as pq

from eagle3_pipeline.samples import Sample, write_samples
from eagle3_pipeline.samples.columns import sample_columns
from tests.samples.test_sample import make_sample

FORMATS = Path(__file__).parents[2] / "docs" / "file-formats.md"


def test_every_field_is_a_column_with_a_meaning() -> None:
    columns = sample_columns()
    assert [one.name for one in columns] == [one.name for one in fields(Sample)]
    meanings = {one.name: one.meaning for one in columns}
    assert all(text.endswith(".") and "\n" not in text for text in meanings.values())
    assert meanings["turn"] == "Number of the user turn that this answers, from 0."
    assert meanings["sampling"] == "The sampling settings that were sent. JSON."


def test_the_file_has_these_columns_of_these_types(tmp_path: Path) -> None:
    write_samples(tmp_path / "samples.parquet", [make_sample()])
    schema = pq.read_schema(tmp_path / "samples.parquet")
    found = [(field.name, re.sub(r"<\w+: ", "<", str(field.type)), field.nullable) for field in schema]
    assert found == [(one.name, one.type, False) for one in sample_columns()]


def test_the_guide_names_the_same_columns_and_types() -> None:
    section = FORMATS.read_text().split("## Samples")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", section, flags=re.MULTILINE)
    kinds = {"list of int32": "list<int32>"}
    assert [(name, kinds.get(kind, kind)) for name, kind in rows] == [
        (one.name, one.type) for one in sample_columns()
    ]
