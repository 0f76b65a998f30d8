"""How far a step is, as lines of JSON that another terminal reads, also when the step is over.

    <storage root>/<recipe slug>/progress/
        synthetic_samples-20260131T235959Z-1234.jsonl     one per call of a step: its start in UTC, its pid

    {"time": ..., "step": ..., "state": "working", "process": ..., "line": "3,000/25,000 ...", ...}

One line per piece of news, and one at the end with how it ended. Each carries who writes, so that a reader
knows whether that process still lives. A torn line is passed over. It is news, not a record: nothing is made
from it, and a disk that takes no more of it ends no job.
"""

import contextlib
import json
import logging
import os
import socket
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eagle3_pipeline.duration import in_words
from eagle3_pipeline.serving.process import ProcessIdentity, pid_namespace

_logger = logging.getLogger(__name__)

_KEPT = 20
_TAIL_BYTES = 1 << 16
# Whether a process of another machine or container lives cannot be looked up: by the age of its news.
_FRESH_S = 60.0


class ProgressFile:
    """The progress of one call of a step; a context manager."""

    def __init__(self, folder: Path, step: str) -> None:
        start = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._path = folder / f"{step}-{start}-{os.getpid()}.jsonl"
        self._step = step
        self._writer = {"host": _host(), "process": _this_process()}
        self._file: FileIO | None = None
        self._is_torn = False
        self._complained = False
        self._last: dict[str, Any] = {}

    def write(self, values: dict[str, Any]) -> None:
        """Append one line; one of `values` is `line`, the text for people. A full disk is logged, once."""
        self._last = values
        self._append("working")

    def __enter__(self) -> Self:
        self._append("working")
        self._forget_old()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if value is None:
            self._append("done")
        elif isinstance(value, Exception):
            self._append("failed", f"{type(value).__name__}: {value}".partition("\n")[0])
        else:
            self._append("interrupted")
        if self._file is not None:
            self._file.close()

    def _append(self, state: str, reason: str = "") -> None:
        head = {"time": time.time(), "step": self._step, "state": state, "reason": reason}
        line = json.dumps({**head, **self._writer, **self._last}).encode() + b"\n"
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = FileIO(self._path, "a")
            line = b"\n" + line if self._is_torn else line
            self._is_torn = True  # until all of it is written
            if self._file.write(line) != len(line):
                raise OSError("only a part of a line was written")
            self._is_torn = False
        except OSError as error:
            if not self._complained:
                _logger.warning(f"{self._path} cannot be written ({error}): eagle3 status shows no progress")
            self._complained = True

    def _forget_old(self) -> None:
        for path in sorted(self._path.parent.glob(f"{self._step}-*.jsonl"))[:-_KEPT]:
            call = _read(path)
            if call is None or not call.lives:
                with contextlib.suppress(OSError):
                    path.unlink()


@dataclass(frozen=True)
class Call:
    """A call of a step, by its last piece of news."""

    step: str
    state: str
    reason: str
    time: float
    """Of the news, in seconds since the epoch."""
    host: str
    """Where the process's pid means something."""
    process: ProcessIdentity
    line: str
    """How far it is, for people; empty before the first news."""

    @property
    def lives(self) -> bool:
        """Whether it is still at work."""
        if self.state != "working":
            return False
        return self.process.alive() if self.is_here else time.time() - self.time < _FRESH_S

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, of this machine and container."""
        return self.host == _host()

    def __str__(self) -> str:
        ago = f"{in_words(max(0.0, time.time() - self.time))} ago"
        if self.lives:
            where = "" if self.is_here else f" on {self.host.partition(' ')[0]}"
            state = f"running (pid {self.process.pid}{where}, {ago})"
        elif self.state == "working":
            state = f"{'killed, ' if self.is_here else ''}last heard of {ago}"
        elif self.state == "failed":
            state = f"failed {ago} ({self.reason})"
        else:
            state = f"{'ended' if self.state == 'done' else self.state} {ago}"
        return f"{state}: {self.line or 'no news yet'}"


def latest_calls(folder: Path) -> list[Call]:
    """Of each step all calls that are at work, or else the one heard of last; in the order of steps."""
    found: dict[str, list[Call]] = defaultdict(list)
    for path in folder.glob("*.jsonl"):
        if (call := _read(path)) is not None:
            found[call.step].append(call)
    shown: list[Call] = []
    for _, calls in sorted(found.items()):
        calls.sort(key=lambda call: call.time)
        shown += [call for call in calls if call.lives] or calls[-1:]
    return shown


def _read(path: Path) -> Call | None:
    """The last line that is whole; None where there is none, or the file went just now."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return _call(json.loads(line))
    return None


def _call(news: dict[str, Any]) -> Call:
    names = [one.name for one in fields(Call)]
    values = {"line": "", **news}
    return Call(**{**{name: values[name] for name in names}, "process": ProcessIdentity(**news["process"])})


def _host() -> str:
    """Where a pid means something: this machine, and on it this container."""
    return f"{socket.gethostname()} {pid_namespace()}"


def _this_process() -> dict[str, Any]:
    identity = ProcessIdentity.of(os.getpid())
    assert identity is not None  # it is this very process
    return asdict(identity)
