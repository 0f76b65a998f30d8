"""Journals torn at any byte, damaged, or written by two."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_pipeline.errors import Busy, DamagedFile
from eagle3_pipeline.journal import Journal, read_journal

_texts = st.text(st.characters(codec="utf-8"), max_size=12)
_records = st.lists(st.dictionaries(_texts, _texts | st.integers() | st.none(), max_size=3), max_size=6)


def _whole_records(lines: list[bytes], cut: int) -> int:
    """How many records after the header end at or before byte `cut`, with or without their newline."""
    ends, position = [], 0
    for line in lines:
        position += len(line) + 1
        ends.append(position - 1)
    return max(0, sum(end <= cut for end in ends) - 1)


@settings(max_examples=60, deadline=None)
@given(records=_records, data=st.data())
def test_a_journal_torn_at_any_byte_keeps_every_whole_record(
    records: list[dict[str, Any]], data: st.DataObject
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        with Journal(path, "f1") as journal:
            journal.append(records)
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        kept = records[: _whole_records(whole.split(b"\n")[:-1], cut)]
        with Journal(path, "f1") as journal:
            assert journal.records == kept
            journal.append([{"after": "the kill"}])
        assert list(read_journal(path)) == [*kept, {"after": "the kill"}]


def test_reading_a_torn_journal_does_not_touch_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Journal(path, "f1") as journal:
        journal.append([{"n": 1}])
    torn = path.read_bytes() + b'{"n": "\xc3'
    path.write_bytes(torn)
    assert list(read_journal(path)) == [{"n": 1}]
    assert path.read_bytes() == torn


@pytest.mark.parametrize("damage", [b"\x00\x00\x00", b"[1, 2]", b'{"n": 1}{"n": 2}', b""])
def test_damage_before_the_last_line_is_refused_and_named(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "a.jsonl"
    with Journal(path, "f1") as journal:
        journal.append([{"n": 1}, {"n": 2}])
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], damage, *lines[2:]]))
    with pytest.raises(DamagedFile, match=r"a\.jsonl, line 2: not a JSON object .* Move the file away"):
        Journal(path, "f1")


def test_a_journal_of_another_fingerprint_is_set_aside_each_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for fingerprint in ("f1", "f2", "f1", "f2"):
        with Journal(path, fingerprint) as journal:
            assert journal.records == []
            journal.append([{"of": fingerprint}])
    aside = sorted(tmp_path.glob("a.jsonl.f*"))
    assert [json.loads(one.read_text().splitlines()[1])["of"] for one in aside] == ["f1", "f1", "f2"]
    assert list(read_journal(path)) == [{"of": "f2"}]


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with (
        Journal(path, "f1"),
        pytest.raises(Busy, match=r"a\.jsonl is being written by another process \(pid \d+ on "),
    ):
        Journal(path, "f1")
    with Journal(path, "f1") as journal:
        assert journal.records == []


def test_a_damaged_journal_leaves_no_lock_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("no json\n{}\n")
    for _ in range(2):
        with pytest.raises(DamagedFile):
            Journal(path, "f1")
