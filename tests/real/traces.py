"""What servers leave on a machine, seen from outside: the project's own search for processes is not asked.

processes      by their folder (a server's is that of its log, inherited by all children, whatever they
               call themselves) or by the host state in their environment (watchers)
ports          that of the server's front end; the others end with their processes
memory         segments and semaphores in /dev/shm that no living process has mapped
files          vLLM's rendezvous files, the scratch folders of servers, the locks that say a server lives
"""

import contextlib
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from eagle3_pipeline.serving.host_state import STATE_VARIABLE, state_folder
from eagle3_pipeline.serving.starting import SOCKETS_VARIABLE

_SETTLE_S = 10.0  # for a watcher or a resource tracker to end after its server
_SEGMENT = re.compile(r" (/dev/shm/\S+)")


class Traces:
    """What servers with their logs below `folder` hold, and what is there of that when they are gone."""

    def __init__(self, folder: Path) -> None:
        """Look at what is there before they are started."""
        self._folder = folder
        self._before = _of_this_host_state() | _files()
        self._paths: set[Path] = set()
        self._ports: set[int] = set()

    def see(self) -> None:
        """Note the shared memory, the scratch folders and the ports of the servers that run now."""
        pids = processes_in(self._folder)
        listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        self._ports |= {one.laddr.port for one in listening if one.pid in pids}
        for pid in pids:
            with contextlib.suppress(psutil.Error, OSError):
                segments = _SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text())
                # One that renamed itself has overwritten its environment.
                scratch = psutil.Process(pid).environ().get(SOCKETS_VARIABLE)
                self._paths |= {Path(path) for path in (*segments, scratch) if path}

    def assert_gone(self) -> None:
        """Fail, naming what is left, unless all of it is gone: what was seen, and whatever is new."""
        assert {path.parent.name for path in self._paths} == {"shm", "tmp"}, "nothing was seen"
        deadline = time.monotonic() + _SETTLE_S
        while left := self._left():
            assert time.monotonic() < deadline, f"left behind: {sorted(left)}"
            time.sleep(0.1)

    def _left(self) -> set[str]:
        processes = {f"process {pid} {command}" for pid, command in processes_in(self._folder).items()}
        new = (_of_this_host_state() | _files()) - self._before
        paths = {str(path) for path in self._paths if path.exists()}
        ports = {f"port {port}" for port in self._ports if _is_taken(port)}
        return processes | new | paths | ports


def processes_in(folder: Path) -> dict[int, str]:
    """The processes of servers with their logs below `folder`: pid and command."""
    return _processes(lambda process: Path(process.cwd()).is_relative_to(folder))


def _of_this_host_state() -> set[str]:
    state = os.environ[STATE_VARIABLE]
    found = _processes(lambda process: process.environ().get(STATE_VARIABLE) == state)
    return {f"process {pid} {command}" for pid, command in found.items()}


def _processes(wanted: Callable[[psutil.Process], bool]) -> dict[int, str]:
    found = {}
    for process in psutil.process_iter():
        try:
            if wanted(process):
                found[process.pid] = " ".join(process.cmdline())[:100]
        except (psutil.Error, OSError):  # it ends just now, or is somebody else's
            continue
    return found


def _files() -> set[str]:
    rendezvous = Path(tempfile.gettempdir()).glob("vllm_dist_*")
    return {str(file) for file in (*rendezvous, *state_folder("servers").glob("*.life"))}


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        # As a server does it: connections that just ended (TIME_WAIT) hold no port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
