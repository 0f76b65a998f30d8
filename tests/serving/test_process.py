import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from eagle3_pipeline.errors import ServerError
from eagle3_pipeline.serving import process as process_module
from eagle3_pipeline.serving.process import (
    MARKER_VARIABLE,
    ProcessIdentity,
    describe,
    end_family,
    exit_status,
    find_family,
    start_process,
)
from tests.serving.observe import wait_for

IGNORES_TERM = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
print("up", flush=True)
time.sleep(99)
"""


def start(tmp_path: Path, code: str, marker: str = "m") -> ProcessIdentity:
    env = {**os.environ, MARKER_VARIABLE: marker}
    process = start_process((sys.executable, "-c", code), env, tmp_path / "log", tmp_path)
    wait_for(lambda: "up" in (tmp_path / "log").read_text())
    return process


def test_a_process_is_itself_only_with_pid_start_and_boot(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; print('up', flush=True); time.sleep(99)")
    assert process.alive()
    assert process.group == process.pid
    assert not replace(process, start_ticks=process.start_ticks + 1).alive()
    assert not replace(process, boot_id="other").alive()
    replace(process, start_ticks=process.start_ticks + 1).send(signal.SIGKILL)
    assert process.alive()
    assert end_family(process, "m") == [process.pid]
    assert not process.alive()
    process.send(signal.SIGKILL)


def test_children_that_ignore_sigterm_are_killed_and_verified(tmp_path: Path) -> None:
    process = start(tmp_path, IGNORES_TERM)
    wait_for(lambda: len(find_family(process, "m")) == 2)
    assert len(end_family(process, "m")) == 2
    assert find_family(process, "m") == []
    assert exit_status(process) == "signal 9 (SIGKILL)"


def test_a_process_hears_signals_that_are_ignored_here(tmp_path: Path) -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = start(tmp_path, "import time; print('up', flush=True); time.sleep(99)")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    process.send(signal.SIGTERM)
    wait_for(lambda: not process.alive())
    assert exit_status(process) == "signal 15 (SIGTERM)"


def test_a_family_that_is_loading_does_not_wait_for_its_leader_who_hears_nothing_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_LEADER_S", 60.0)
    monkeypatch.setattr(process_module, "_FOLLOW_S", 4.0)
    code = """
import os, signal, time
if os.fork():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    os.wait()
time.sleep(0 if os.getpid() == os.getsid(0) else 99)
"""
    process = start(tmp_path, code)
    wait_for(lambda: len(find_family(process, "m")) == 2)
    began = time.monotonic()
    assert len(end_family(process, "m", loading=True)) == 2
    assert time.monotonic() - began < 5
    assert exit_status(process) == "exit code 0"


def test_an_own_child_that_ended_is_no_zombie_and_tells_its_exit_code(tmp_path: Path) -> None:
    process = start(tmp_path, "print('up', flush=True); raise SystemExit(3)")
    wait_for(lambda: not process.alive())
    assert exit_status(process) == "exit code 3"


def test_a_process_whose_main_thread_ended_lives_as_long_as_its_threads(tmp_path: Path) -> None:
    code = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(99,)).start()
print("up", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit(2) of this thread alone
"""
    process = start(tmp_path, code)
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert process.alive()
    assert end_family(process, "m") == [process.pid]
    assert not process.alive()


def test_the_caller_is_never_part_of_a_family() -> None:
    own = ProcessIdentity.of(os.getpid())
    assert own is not None
    assert os.getpid() not in [process.pid for process in find_family(own, "none")]


def test_a_session_number_that_went_to_a_stranger_is_not_the_family(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        now = ProcessIdentity.of(stranger.pid)
        assert now is not None
        earlier = replace(now, start_ticks=now.start_ticks - 1)
        assert find_family(earlier, "m") == []
        assert end_family(earlier, "m") == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_member_of_the_dead_leaders_session_without_the_marker_is_a_strangers(tmp_path: Path) -> None:
    code = "import os, time\nif os.fork() == 0: time.sleep(60)\n"
    leader = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env={"PATH": "/bin"})
    identity = ProcessIdentity.of(leader.pid)
    assert identity is not None
    leader.wait()
    try:
        assert find_family(identity, "m") == []
    finally:
        os.killpg(leader.pid, signal.SIGKILL)


def test_a_process_that_survives_sigkill_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(tmp_path, "import time; print('up', flush=True); time.sleep(99)")
    rounds = [(signal.SIGCONT, 0.1, None)]
    monkeypatch.setattr(process_module, "_ROUNDS", rounds)
    with monkeypatch.context() as patch:
        patch.setattr(ProcessIdentity, "send", lambda self, number: None)
        with pytest.raises(ServerError, match=rf"{process.pid}\] survive SIGKILL"):
            end_family(process, "m")
    process.send(signal.SIGKILL)
    wait_for(lambda: not process.alive())


def test_a_process_is_described_by_pid_and_command() -> None:
    assert describe(os.getpid()).startswith(f"pid {os.getpid()} (")
    assert "command unknown" in describe(2**22 + 1)
