import asyncio
import os
import threading
from pathlib import Path

import pytest

from eagle3_pipeline.errors import Busy, NotEnoughRoom
from eagle3_pipeline.staging import (
    FAILED_SUFFIX,
    NO_ROOM_SUFFIX,
    WriteFailed,
    empty_unless_awaited,
    is_awaited,
    staging_folder,
    temporary_name,
    wait_for_file,
)


def test_staging_is_empty_before_and_after_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    file = tmp_path / "cmpl-1-0.safetensors"
    leftovers = [
        file,
        temporary_name(file),
        *(Path(f"{file}{end}") for end in (NO_ROOM_SUFFIX, FAILED_SUFFIX)),
    ]
    (tmp_path / "notes.txt").touch()
    for path in leftovers:
        path.touch()
    with staging_folder(tmp_path):
        assert not any(path.exists() for path in leftovers)
        file.touch()
    assert not file.exists()
    assert (tmp_path / "notes.txt").exists()


def test_two_processes_never_share_a_staging_folder(tmp_path: Path) -> None:
    with staging_folder(tmp_path), pytest.raises(Busy), staging_folder(tmp_path):
        pass
    with staging_folder(tmp_path):
        pass


def _wait(path: Path, limit_s: float = 5.0) -> None:
    asyncio.run(wait_for_file(path, limit_s))


def test_a_file_is_waited_for_until_it_has_its_name(tmp_path: Path) -> None:
    path = tmp_path / "cmpl-1-0.safetensors"
    temporary_name(path).touch()

    async def both() -> None:
        waiting = asyncio.create_task(wait_for_file(path, 5.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        temporary_name(path).rename(path)
        await waiting

    asyncio.run(both())
    assert path.exists()


def test_a_mark_says_at_once_why_there_will_be_no_file_and_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "cmpl-1-0.safetensors"
    path.with_name(path.name + NO_ROOM_SUFFIX).touch()
    with pytest.raises(NotEnoughRoom, match="is full"):
        _wait(path)
    path.with_name(path.name + FAILED_SUFFIX).write_text("OSError: odd")
    with pytest.raises(WriteFailed, match="OSError: odd"):
        _wait(path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(TimeoutError, match="is not there"):
        _wait(path, 0.01)


def test_a_holder_is_named(tmp_path: Path) -> None:
    with (
        staging_folder(tmp_path),
        pytest.raises(Busy, match=rf"process {os.getpid()} on .* captures hidden states through"),
        staging_folder(tmp_path),
    ):
        pass


def test_the_server_sees_whether_anybody_waits(tmp_path: Path) -> None:
    folder = tmp_path / "staging"
    assert not is_awaited(folder)
    with staging_folder(folder):
        assert is_awaited(folder)
        (folder / "cmpl-1-0.safetensors").touch()
        empty_unless_awaited(folder)
        assert (folder / "cmpl-1-0.safetensors").exists()
    assert not is_awaited(folder)
    (folder / "cmpl-2-0.safetensors").touch()
    empty_unless_awaited(folder)
    assert not list(folder.glob("*.safetensors"))
    empty_unless_awaited(tmp_path / "never")


def test_a_server_that_looks_never_makes_a_client_fail(tmp_path: Path) -> None:
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            is_awaited(tmp_path)

    looking = [threading.Thread(target=look) for _ in range(2)]
    for thread in looking:
        thread.start()
    try:
        for _ in range(100):
            with staging_folder(tmp_path):
                assert is_awaited(tmp_path)
    finally:
        ended.set()
        for thread in looking:
            thread.join()
