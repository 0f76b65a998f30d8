"""A journal: JSON lines that survive kill -9 and power loss, appended and fsynced in batches.

    {"journal": 1, "fingerprint": "..."}\\n
    {...record...}\\n
    {...reco                          <- a torn tail after a kill: cut off at the next open

A last line that is complete but lacks its newline is kept. Damage before the last line is not
repaired: it raises DamagedFile, because it is not what a kill leaves behind.
"""

import fcntl
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eagle3_pipeline.durable_files import write_atomic
from eagle3_pipeline.errors import Busy, DamagedFile


class Journal:
    """Append-only JSON lines of one writer, resumable after a kill at any byte.

    Opening takes an exclusive lock: a second writer raises Busy. A journal whose header
    carries another fingerprint is set aside (renamed with the time), neither continued nor deleted.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        slim: Callable[[dict[str, Any]], dict[str, Any]] = lambda record: record,
    ) -> None:
        """Open or create the journal at `path`; raises DamagedFile and Busy.

        `records` are those that were there, each as `slim` leaves it, and `offsets` says where each begins.
        """
        self.path = path
        self.records: list[dict[str, Any]] = []
        self.offsets: list[int] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        # The lock's file says who holds it, so opening it must not empty it.
        self._lock = path.with_name(path.name + ".lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.seek(0)
            who = self._lock.read()
            self._lock.close()
            raise Busy(
                f"{path} is being written by another process ({who or 'its pid is not known'}). "
                "Wait for it or stop it."
            ) from error
        try:
            self._lock.truncate(0)
            self._lock.write(f"pid {os.getpid()} on {socket.gethostname()}")
            self._lock.flush()
            self._recover(fingerprint, slim)
            self._file = path.open("r+b")
            self._size = self._file.seek(0, os.SEEK_END)
        except BaseException:
            self._lock.close()
            raise

    def _recover(self, fingerprint: str, slim: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        header = {"journal": 1, "fingerprint": fingerprint}
        if self.path.exists():
            _mend_tail(self.path)
            found = next((value for _, value in _read_journal(self.path)), None)
            if found == header:
                for offset, value in itertools.islice(_read_journal(self.path), 1, None):
                    self.records.append(slim(value))
                    self.offsets.append(offset)
                return
            if found is not None:
                # Nanoseconds, so that none set aside before is overwritten.
                other = str(found.get("fingerprint", "unknown"))[:12]
                self.path.rename(self.path.with_name(f"{self.path.name}.{other}-{time.time_ns()}"))
        write_atomic(self.path, json.dumps(header) + "\n")

    def append(self, records: Iterable[dict[str, Any]]) -> list[int]:
        """Append records and return, when they are on the disk, where each begins."""
        lines = [json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records]
        if not lines:
            return []
        self._file.seek(self._size)
        self._file.write(b"".join(lines))
        self._file.flush()
        os.fsync(self._file.fileno())
        *offsets, self._size = itertools.accumulate(map(len, lines), initial=self._size)
        return offsets

    def read(self, offset: int) -> dict[str, Any]:
        """The record that begins at `offset`."""
        self._file.seek(offset)
        record: dict[str, Any] = json.loads(self._file.readline())
        return record

    def close(self) -> None:
        """Close the file and free the lock."""
        try:
            self._file.close()
        finally:
            self._lock.close()  # also where a full disk refuses the last bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a journal without its header; a torn tail is left out, and left alone."""
    for _, record in itertools.islice(_read_journal(path), 1, None):
        yield record


def _read_journal(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Header and records, each with its offset; raises DamagedFile for damage before the last line."""
    with path.open("rb") as file:
        offset, number, line = 0, 1, file.readline()
        while line:
            following = file.readline()
            try:
                value = json.loads(line)
                if not isinstance(value, dict):
                    raise ValueError("not an object")
            except ValueError as error:
                if not following and not line.endswith(b"\n"):
                    return
                raise DamagedFile(
                    f"{path}, line {number}: not a JSON object ({line[:60]!r}...). A kill only tears the "
                    "last line, so something else wrote here. Move the file away to make its records again."
                ) from error
            yield offset, value
            offset, number, line = offset + len(line), number + 1, following


def _mend_tail(path: Path) -> None:
    """Give a whole last record its newline, and cut a torn one off."""
    with path.open("r+b") as file:
        start, tail = 0, b""
        for line in file:
            start, tail = start + len(tail), line
        if not tail or tail.endswith(b"\n"):
            return
        try:
            is_whole = isinstance(json.loads(tail), dict)
        except ValueError:
            is_whole = False
        if is_whole:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(start)
        file.flush()
        os.fsync(file.fileno())
