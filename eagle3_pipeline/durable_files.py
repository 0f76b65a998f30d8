"""Files that survive kill -9 and power loss: atomic writes, journals, checksums, free space.

    write_atomic   data in a temporary file, fsync, rename over the name, fsync of the folder
    Journal        JSON lines; the first line is a header; appended and fsynced in batches

Journal on disk::

    {"journal": 1, "fingerprint": "..."}\\n
    {...record...}\\n
    {...reco                          <- a torn tail after a kill: cut off at the next open

A last line that is complete but lacks its newline is kept. Damage before the last line is not
repaired: it raises DamagedFile, because it is not what a kill leaves behind.
"""

import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eagle3_pipeline.errors import Busy, DamagedFile, NotEnoughRoom

_CHUNK_BYTES = 1 << 20


def fsync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the content of a file, written by whatever library, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `path` such that any reader, at any time, sees the old content or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    payload = data.encode() if isinstance(data, str) else data
    try:
        with temporary.open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically as indented JSON."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sha256_of_file(path: Path) -> str:
    """Hex SHA-256 of a file's content, read in chunks of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """Put a file that is never written in place again at a second path, in place of what is there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
        fsync_file(target)


def require_free_bytes(
    folder: Path,
    wanted: int,
    purpose: str,
    way_out: str = "Free some space, or point EAGLE3_STORAGE to a larger disk.",
) -> None:
    """Raise NotEnoughRoom, ending with `way_out`, unless the disk of `folder` has `wanted` bytes free."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < wanted:
        raise NotEnoughRoom(
            f"{purpose} needs {wanted / 2**30:.1f} GiB on the disk of {existing}, {free / 2**30:.1f} GiB are "
            f"free. {way_out}"
        )


@contextmanager
def full_disk_named(folder: Path, way_out: str) -> Iterator[None]:
    """Turn the operating system's "no space left" into NotEnoughRoom with a way out."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NotEnoughRoom(f"the disk of {folder} is full ({error}). {way_out}") from error


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
