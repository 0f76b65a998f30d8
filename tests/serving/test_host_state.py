"""The folder that all users share: what somebody else put there leads nobody astray."""

import json
import os
from pathlib import Path

import pytest

from eagle3_pipeline.errors import BadInput
from eagle3_pipeline.serving import record as record_module
from eagle3_pipeline.serving.host_state import is_locked, open_shared, state_folder
from eagle3_pipeline.serving.record import all_records, read_record
from tests.records import process_of_a_server, write_record


def test_a_link_in_the_place_of_the_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "link"
    elsewhere.mkdir()
    link.symlink_to(elsewhere)
    with monkeypatch.context() as patch:
        patch.setenv("EAGLE3_HOST_STATE", str(link))
        with pytest.raises(BadInput, match=f"{link} is a link or a file, .* set EAGLE3_HOST_STATE"):
            state_folder("leases")
    assert not list(elsewhere.iterdir())


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("text")
    link = state_folder("leases") / "gpu-0.holders"
    link.symlink_to(precious)
    for look in (lambda: open_shared(link, os.O_RDWR), lambda: is_locked(link)):
        with pytest.raises(OSError, match="symbolic links"):
            look()
    assert precious.read_text() == "text"


def test_a_record_in_the_name_of_another_user_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with process_of_a_server() as process:
        record = write_record(process)
        forged = record.path.with_name("eagle3-forged-12345.json")
        forged.write_text(json.dumps({**json.loads(record.path.read_text()), "uid": 12345}))
        of_a_third = os.stat_result((0o100644, 0, 0, 1, 777, 777, 0, 0, 0, 0))
        with monkeypatch.context() as patch:
            patch.setattr(record_module.os, "fstat", lambda _: of_a_third)
            assert read_record(forged) is None
            assert list(all_records()) == []
        assert [one.marker for one in all_records() if one.uid == os.getuid()] == [record.marker]
        record.remove()


def test_a_link_in_the_place_of_a_record_is_none() -> None:
    with process_of_a_server() as process:
        record = write_record(process)
        link = record.path.with_name("eagle3-link-0.json")
        link.symlink_to(record.path)
        assert read_record(link) is None
        record.remove()
