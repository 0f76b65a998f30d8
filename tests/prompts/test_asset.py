"""What the prompts asset shows: each row's fate in a table that adds up."""

import json
from pathlib import Path

import dagster as dg

from assets.prompts import _tables
from eagle3_pipeline.prompts.selection import make_prompts
from tests.prompts.world import make_lineage
from tests.recipes import distinct_prompts


def test_the_table_of_the_screening_adds_up_to_the_rows_and_shows_one_example_per_reason(
    tmp_path: Path, tiny_llama: Path
) -> None:
    texts = distinct_prompts(16, seed=1)
    rows = [{"prompt": text} for text in texts] + [{"prompt": ""}] * 3 + [{"column " * 100: "x"}]
    rows += [{"messages": [{"role": "user", "content": text}] * 2} for text in texts[:2]]
    lineage = make_lineage(tmp_path, tiny_llama, rows, count=16, sources=[{"path": "train.jsonl"}])
    manifest = make_prompts(lineage)
    tables = _tables(manifest)
    assert all(isinstance(table, dg.TableMetadataValue) for table in tables.values())
    lines = [record.data for record in tables["screening"].records]
    assert [column.name for column in tables["screening"].schema.columns] == list(lines[0])
    assert sum(line["rows"] for line in lines) == manifest.facts["rows_in"]
    assert lines[0] == {
        "reason": "kept",
        "rows": 16,
        "share": round(16 / manifest.facts["rows_in"], 4),
        "example": "",
        "detail": "",
    }
    rejected = (lineage.prompts().folder / "rejected.jsonl").read_text().splitlines()
    places = {json.loads(line)["where"] for line in rejected}
    assert {line["example"] for line in lines[1:]} <= places
    assert all(0 < len(line["detail"]) <= 200 for line in lines[1:])
    (source,) = [record.data for record in tables["sources"].records]
    assert (source["source"], source["rows"], source["kept"]) == (
        "train.jsonl",
        manifest.facts["rows_in"],
        16,
    )
