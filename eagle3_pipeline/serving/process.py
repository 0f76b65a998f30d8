"""Processes that are told from others for certain, and the end of a whole family of them.

A pid alone proves nothing: it may have been given to somebody else. A process is known by pid, start
time and boot. A family is a leader with all that came of it, found in three ways, because after the
leader's death its children belong to init and may have changed their name:

    by session or group   the leader opened its own session; its number is not given away while anybody
                          is in it
    by marker             EAGLE3_SERVER=<token> in the environment, inherited by every child
    by descent            children of the processes found above

Once the leader is gone, a process of the session whose environment can be read and lacks the marker is
taken for somebody else's.
"""

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

import psutil

from eagle3_pipeline.errors import Busy, ServerError
from eagle3_pipeline.parent_death import heed_signals

logger = logging.getLogger(__name__)

MARKER_VARIABLE = "EAGLE3_SERVER"
_ZOMBIE_STATES = "ZX"
_LEADER_S = 20.0  # vLLM's ends within a second when idle; one with requests in flight aborts them first
_FOLLOW_S = 2.0  # for its children to end after it
# Signal, seconds to wait, who is spared. Python's resource tracker removes the shared memory of those killed
# before it and then ends by itself.
_ROUNDS = (
    (signal.SIGTERM, 10.0, None),
    (signal.SIGKILL, 3.0, "multiprocessing.resource_tracker"),
    (signal.SIGKILL, 10.0, None),
)
# Children of this very process. They are polled, so that a dead one is no zombie for the others.
_children: dict[int, subprocess.Popen[bytes]] = {}


@cache
def boot_id() -> str:
    """Identity of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Identity of the pid namespace, within which process ids mean something: another one per container."""
    return str(Path("/proc/self/ns/pid").readlink())


@dataclass(frozen=True)
class _Stat:
    """The fields of /proc/<pid>/stat that matter here (proc_pid_stat(5))."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    threads: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The name in parentheses may hold blanks and parentheses itself.
        fields = text[text.rindex(")") + 2 :].split()
        numbers = [int(fields[index]) for index in (1, 2, 3, 17, 19)]
        return cls(pid, fields[0], *numbers)

    @property
    def runs(self) -> bool:
        # A worker of vLLM shows as a zombie while threads of it go on and hold its memory.
        return self.state not in _ZOMBIE_STATES or self.threads > 1


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, told from every other: pid, start (clock ticks since boot), boot, process group."""

    pid: int
    start_ticks: int
    boot_id: str
    group: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The identity of a pid's process, a zombie included; None when there is none."""
        stat = _Stat.of(pid)
        return cls(pid, stat.start_ticks, boot_id(), stat.group) if stat else None

    def alive(self) -> bool:
        """Whether this very process runs (a zombie does not)."""
        _reap()
        if self.boot_id != boot_id():
            return False
        stat = _Stat.of(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.runs

    def send(self, number: signal.Signals) -> None:
        """Signal this very process; nothing happens when it is gone. Raises PermissionError."""
        # The descriptor pins the process before it is looked at, so the pid cannot change hands in between.
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.alive():
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(descriptor)


def start_process(
    argv: tuple[str, ...], env: Mapping[str, str], log: Path, folder: Path, keep: tuple[int, ...] = ()
) -> ProcessIdentity:
    """Start `argv` in its own session, without our terminal, its output appended to `log`; raises OSError.

    It inherits the descriptors `keep`, and with them the locks on their files.
    """
    with log.open("ab") as output:
        child = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=keep,
            preexec_fn=heed_signals,
        )
    _children[child.pid] = child
    identity = ProcessIdentity.of(child.pid)
    assert identity is not None  # our child stays in the table until we reap it
    return identity


def exit_status(process: ProcessIdentity) -> str | None:
    """How our own child ended, in words; None when it runs or is somebody else's child."""
    child = _children.get(process.pid)
    code = child.poll() if child else None
    if code is None:
        return None
    if code >= 0:
        return f"exit code {code}"
    return f"signal {-code} ({signal.Signals(-code).name})"


@atexit.register
def _let_go() -> None:
    """Servers outlive us on purpose; Popen would warn of each at the interpreter's end."""
    for child in _children.values():
        if child.poll() is None:
            child.returncode = 0


def _reap() -> None:
    for child in list(_children.values()):
        child.poll()


def find_family(leader: ProcessIdentity | None, marker: str) -> list[ProcessIdentity]:
    """All living processes of a family; the leader may be dead, or unknown (None)."""
    _reap()
    stats = {stat.pid: stat for pid in psutil.pids() if (stat := _Stat.of(pid)) is not None}
    family = {stat.pid for stat in stats.values() if _belongs(stat, leader, marker, stats)}
    grown = True
    while grown:
        born = {stat.pid for stat in stats.values() if stat.parent in family} - family
        family |= born
        grown = bool(born)
    family -= {os.getpid(), 1}
    return [
        ProcessIdentity(pid, stats[pid].start_ticks, boot_id(), stats[pid].group)
        for pid in sorted(family)
        if stats[pid].runs
    ]


def _belongs(stat: _Stat, leader: ProcessIdentity | None, marker: str, stats: Mapping[int, _Stat]) -> bool:
    marked = _carries(stat.pid, marker)
    if marked or leader is None or leader.boot_id != boot_id():
        return bool(marked)
    in_session = leader.pid in (stat.session, stat.group) and stat.start_ticks >= leader.start_ticks
    now = stats.get(leader.pid)
    if now is None:  # the session outlived its leader, or its number was given away since: the marker decides
        return in_session and marked is None
    return in_session and now.start_ticks == leader.start_ticks


def _carries(pid: int, marker: str) -> bool | None:
    """Whether it carries the marker; None when its environment is hidden or overwritten (setproctitle)."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    if f"{MARKER_VARIABLE}={marker}".encode() in entries:
        return True
    return False if any(entry.startswith((b"PATH=", b"HOME=")) for entry in entries) else None


def end_family(leader: ProcessIdentity | None, marker: str, *, loading: bool = False) -> list[int]:
    """End a family and return the pids that were ended, once every one is gone; raises ServerError, Busy.

    The leader is asked first, for it takes its children down in order. What is left then is asked itself,
    and then killed. While it is `loading` all are asked at once and soon killed: vLLM 0.32 loses a SIGTERM
    that comes before it serves, and loads on.
    """
    known: set[ProcessIdentity] = set()
    rounds = ((signal.SIGTERM, _FOLLOW_S, None), *_ROUNDS[1:]) if loading else _ROUNDS

    def left() -> list[ProcessIdentity]:
        known.update(find_family(leader, marker))
        return [process for process in known if process.alive()]

    try:
        if left() and leader is not None and leader.alive() and not loading:
            leader.send(signal.SIGTERM)
            _wait(lambda: not leader.alive(), _LEADER_S)
            _wait(lambda: not left(), _FOLLOW_S)
        for number, limit_s, spared in rounds:
            for process in left():
                if not (spared and spared in describe(process.pid)):
                    process.send(number)
            _wait(lambda: not left(), limit_s)
    except PermissionError as error:
        raise Busy(
            f"processes {[process.pid for process in left()]} of an idle server belong to another user. "
            "Ask that user to stop it, or wait until it stops by itself."
        ) from error
    if survivors := left():
        raise ServerError(
            f"processes {[process.pid for process in survivors]} survive SIGKILL, so a driver call may hang. "
            "Look at `dmesg`; a GPU in this state needs a reset."
        )
    return sorted(process.pid for process in known)


def _wait(done: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def describe(pid: int) -> str:
    """A pid with its command, for messages."""
    command = ""
    with contextlib.suppress(psutil.Error):
        command = " ".join(psutil.Process(pid).cmdline())
    return f"pid {pid} ({command[:200] or 'command unknown'})"
