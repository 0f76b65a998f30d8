"""News of a step for another terminal: who lives, how it ended, and that it never ends a job."""

import json
import logging
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eagle3_pipeline.errors import ServerDied
from eagle3_pipeline.progress_file import Call, ProgressFile, latest_calls
from tests.serving.observe import wait_for

_WRITER = """
import sys, time
from pathlib import Path
from eagle3_pipeline.progress_file import ProgressFile
with ProgressFile(Path(sys.argv[1]), "samples") as progress:
    progress.write({"line": "of another process"})
    sys.stdin.read()
"""


@contextmanager
def other_process(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has told its news and is at work until its stdin ends."""
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(folder)], stdin=subprocess.PIPE) as process:
        try:
            wait_for(lambda: any(call.line == "of another process" for call in latest_calls(folder)))
            yield process
        finally:
            process.kill()


def only(folder: Path) -> Call:
    (call,) = latest_calls(folder)
    return call


def shown(folder: Path) -> str:
    return re.sub(r"\b\d s ago", "just now", str(only(folder)))


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def change_last_line(path: Path, **values: object) -> None:
    """Put a line like the last one, with other values, in the place of all."""
    path.write_text(json.dumps(json.loads(path.read_text().splitlines()[-1]) | values) + "\n")


# --- how it goes


def test_a_call_at_work_shows_its_last_news_and_its_process(tmp_path: Path) -> None:
    with ProgressFile(tmp_path, "samples") as progress:
        assert shown(tmp_path) == f"running (pid {os.getpid()}, just now): no news yet"
        for number in range(3):
            progress.write({"line": f"{number}/3 replies", "done": number})
        assert shown(tmp_path) == f"running (pid {os.getpid()}, just now): 2/3 replies"
    lines = [json.loads(line) for line in only_file(tmp_path).read_text().splitlines()]
    assert [line.get("done") for line in lines] == [None, 0, 1, 2, 2]
    assert all(line["process"]["pid"] == os.getpid() for line in lines)


def test_a_call_that_is_over_shows_when_and_how_it_ended_and_how_far_it_was(tmp_path: Path) -> None:
    with ProgressFile(tmp_path, "samples") as progress:
        progress.write({"line": "3/3 replies"})
    path = only_file(tmp_path)
    change_last_line(path, time=path.stat().st_mtime - 12 * 60)
    assert shown(tmp_path) == "ended 12 min ago: 3/3 replies"


def test_a_call_that_failed_says_of_what(tmp_path: Path) -> None:
    def fail() -> None:
        with ProgressFile(tmp_path, "samples") as progress:
            progress.write({"line": "2/3 replies"})
            raise ServerDied("signal 9\nits log: ...")

    with pytest.raises(ServerDied):
        fail()
    assert shown(tmp_path) == "failed just now (ServerDied: signal 9): 2/3 replies"


def test_a_call_that_was_cancelled_is_interrupted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), ProgressFile(tmp_path, "samples"):
        raise KeyboardInterrupt
    assert shown(tmp_path) == "interrupted just now: no news yet"


# --- several


def test_two_processes_at_work_both_show_and_a_killed_one_is_known_as_such(tmp_path: Path) -> None:
    with other_process(tmp_path) as process:
        with ProgressFile(tmp_path, "samples") as progress:
            progress.write({"line": "of this process"})
            assert {call.process.pid for call in latest_calls(tmp_path)} == {os.getpid(), process.pid}
        assert only(tmp_path).process.pid == process.pid  # it still works; the other one is over
        only_file_of_other = next(tmp_path.glob(f"*-{process.pid}.jsonl"))
        next(tmp_path.glob(f"*-{os.getpid()}.jsonl")).unlink()
        process.kill()
        process.wait()
        assert shown(tmp_path) == "killed, last heard of just now: of another process"
        change_last_line(only_file_of_other, process={**_identity(only_file_of_other), "pid": os.getpid()})
        assert not only(tmp_path).lives  # its pid was given to somebody else


def _identity(path: Path) -> dict[str, object]:
    return dict(json.loads(path.read_text().splitlines()[-1])["process"])


def test_a_call_on_another_machine_is_at_work_as_long_as_its_news_are_fresh(tmp_path: Path) -> None:
    with ProgressFile(tmp_path, "samples") as progress:
        progress.write({"line": "1/3 replies"})
        path = only_file(tmp_path)
        change_last_line(path, host="node7 pid:[1]")
        assert shown(tmp_path) == f"running (pid {os.getpid()} on node7, just now): 1/3 replies"
        change_last_line(path, time=only(tmp_path).time - 300)
        assert shown(tmp_path) == "last heard of 5 min ago: 1/3 replies"


def test_the_newest_of_each_step_that_is_over_shows(tmp_path: Path) -> None:
    for step in ("samples", "states"):
        for number in range(3):
            with ProgressFile(tmp_path, step) as progress:
                progress.write({"line": f"{step} {number}"})
    assert [(call.step, call.line) for call in latest_calls(tmp_path)] == [
        ("samples", "samples 2"),
        ("states", "states 2"),
    ]


def test_the_newest_twenty_are_kept_of_each_step_and_those_at_work(tmp_path: Path) -> None:
    with ProgressFile(tmp_path, "samples"):
        pass
    line = only_file(tmp_path).read_text().splitlines()[-1]
    only_file(tmp_path).unlink()
    for number in range(30):
        (tmp_path / f"samples-20200101T0000{number:02}Z-1.jsonl").write_text(f"{line}\n")
    (tmp_path / "states-20190101T000000Z-1.jsonl").write_text(f"{line}\n")
    with ProgressFile(tmp_path, "samples") as first:
        first.write({"line": "at work"})
        assert len(list(tmp_path.glob("samples-*"))) == 20
        only_one = next(tmp_path.glob(f"samples-*-{os.getpid()}.jsonl"))
        at_work = only_one.rename(tmp_path / "samples-20100101T000000Z-1.jsonl")
        with ProgressFile(tmp_path, "samples"):
            assert at_work.exists()
    assert len(list(tmp_path.glob("states-*"))) == 1


# --- damage


def test_there_is_nothing_to_show_without_a_folder_or_a_whole_line(tmp_path: Path) -> None:
    assert latest_calls(tmp_path / "none") == []
    (tmp_path / "samples-20200101T000000Z-1.jsonl").write_bytes(b'{"time": 1\nnull\n{"step"')
    assert latest_calls(tmp_path) == []


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    with ProgressFile(tmp_path, "samples") as progress:
        progress.write({"line": "1/3 replies"})
        with only_file(tmp_path).open("ab") as file:
            file.write(b'{"time": 17')
        assert only(tmp_path).line == "1/3 replies"


def test_a_long_file_is_read_at_its_end_alone(tmp_path: Path) -> None:
    with ProgressFile(tmp_path, "samples") as progress:
        for number in range(5):
            progress.write({"line": str(number), "more": "x" * 30_000})
        assert only(tmp_path).line == "4"


def test_a_disk_that_is_full_for_a_while_tears_a_line_and_ends_no_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ProgressFile(tmp_path, "samples") as progress:
        path = only_file(tmp_path)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
        try:
            for _ in range(3):
                progress.write({"line": "lost"})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        progress.write({"line": "2/3 replies"})
        assert only(tmp_path).line == "2/3 replies"
    assert "lost" not in path.read_text()
    assert [one.levelno for one in caplog.records] == [logging.WARNING]
    assert "eagle3 status" in caplog.text


def test_a_folder_that_cannot_be_made_ends_no_job_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "progress").write_text("not a folder")
    with ProgressFile(tmp_path / "progress", "samples") as progress:
        progress.write({"line": "1/3 replies"})
        progress.write({"line": "2/3 replies"})
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text
