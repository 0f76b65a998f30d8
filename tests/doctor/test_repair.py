"""What the doctor puts right, and what it leaves alone."""

import shutil
from pathlib import Path

import pytest

from eagle3_pipeline.doctor import Mark, leftovers, repair
from eagle3_pipeline.serving.process import ProcessIdentity
from tests.records import process_of_a_server, write_record

MARKER = "0123456789ab" + "0" * 20


def _dead(process: ProcessIdentity) -> ProcessIdentity:
    return ProcessIdentity(process.pid, process.start_ticks - 100, process.boot_id, process.group)


def test_a_machine_in_order_is_left_as_it_is() -> None:
    with process_of_a_server() as process:
        record = write_record(process)
        (found,) = repair()
        assert (found.mark, found.what) == (Mark.OK, "nothing of a server that is gone is left")
        assert process.alive()
        assert record.path.exists()


def test_a_dead_server_is_forgotten_and_its_living_processes_are_ended() -> None:
    with process_of_a_server(MARKER) as child, process_of_a_server() as leader:
        record = write_record(_dead(leader), marker=MARKER)
        (found,) = repair()
        assert (found.mark, "was dead: its processes are ended" in found.what) == (Mark.OK, True)
        assert not child.alive()
        assert leader.alive()  # another process, which was given the pid of the dead one
        assert not record.path.exists()
        assert "nothing" in next(repair()).what


def test_processes_without_a_record_are_ended_only_where_it_can_be_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with process_of_a_server(MARKER) as process:  # it names no host state in its environment
        assert "nothing" in next(repair()).what
        assert process.alive()
        monkeypatch.setattr(leftovers, "state_root", lambda _=None: Path("/tmp/eagle3-pipeline"))
        (found,) = [one for one in repair() if str(process.pid) in one.what]
        assert found.mark == Mark.OK
        assert not process.alive()


def test_folders_of_servers_that_are_gone_are_removed_and_those_of_others_are_not(tmp_path: Path) -> None:
    with process_of_a_server(MARKER) as process:
        write_record(process, marker=MARKER)
        gone, used = (tmp_path / "tmp" / f"eagle3-ipc-{one}" for one in ("f" * 12, MARKER[:12]))
        for folder in (gone, used):
            folder.mkdir()
            (folder / "socket").touch()
        (tmp_path / "shm" / "psm_1c519e15").write_bytes(b"x")
        (found,) = repair()
        assert (found.mark, str(gone) in found.what) == (Mark.OK, True)
        assert not gone.exists()
        assert (used / "socket").exists()
        assert (tmp_path / "shm" / "psm_1c519e15").exists()


def test_what_cannot_be_done_is_a_problem_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp" / f"eagle3-ipc-{'f' * 12}").mkdir()

    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        (found,) = repair()
    assert (found.mark, found.advice) == (Mark.PROBLEM, "PermissionError: [Errno 13] Permission denied")
