"""Files that survive kill -9: atomic writes, checksums, free space."""

import hashlib
import os
from pathlib import Path

import pytest

from eagle3_pipeline.durable_files import require_free_bytes, sha256_of_file, write_atomic, write_json
from eagle3_pipeline.errors import NotEnoughRoom


def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "old")

    def no_room(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_json_is_written_as_people_read_it(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"name": "Zoë"})
    assert (tmp_path / "a.json").read_text() == '{\n  "name": "Zoë"\n}\n'


def test_a_checksum_is_that_of_the_whole_file(tmp_path: Path) -> None:
    content = b"x" * ((1 << 20) + 1)  # one byte more than is read at once
    (tmp_path / "a").write_bytes(content)
    assert sha256_of_file(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_too_little_room_is_told_with_both_numbers(tmp_path: Path) -> None:
    require_free_bytes(tmp_path / "not" / "yet" / "there", 1, "nothing")
    with pytest.raises(
        NotEnoughRoom, match=r"the states needs 1073741824\.0 GiB on the disk of .*, [\d.]+ GiB are free\. "
    ):
        require_free_bytes(tmp_path / "not" / "there", 1 << 60, "the states")
