"""The staging folder between the vLLM server and the capturing client: names, locks, emptying.

    staging.lock       held by the client that uses the folder, with its process id and host as the text
    staging.awaited    held beside it, so that the server can see whether anybody waits for files

Files live in it from the server's write to the client's read, so it holds at most a few files per
sample in flight. It is used by one process at a time and is empty before and after. A server outlasts its
clients: what it has for one that is gone is not written.
"""

import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from eagle3_pipeline.errors import Busy, NotEnoughRoom

FILE_SUFFIX = ".safetensors"
NO_ROOM_SUFFIX = ".no-room"
FAILED_SUFFIX = ".failed"
_LOCK_NAME = "staging.lock"
_AWAITED_NAME = "staging.awaited"
_POLL_S = (0.002, 0.1)  # first and longest pause between two looks


class WriteFailed(Exception):
    """The server could not write a file; the message is what it said. Another attempt may work."""


def temporary_name(path: Path) -> Path:
    """Where the file `path` is written before it gets its name."""
    return path.with_name(f".{path.name}.tmp")


@contextlib.contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """Make `folder`, lock it, empty it, yield it and empty it again; raises Busy, which names the holder."""
    folder.mkdir(parents=True, exist_ok=True)
    # Not "w", which would wipe out the holder's name before the lock is asked for.
    with (folder / _LOCK_NAME).open("a+") as lock, (folder / _AWAITED_NAME).open("a") as awaited:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            raise Busy(
                f"{holder} captures hidden states through {folder}. Wait for it or stop it."
            ) from error
        with contextlib.suppress(OSError):  # on a full disk the holder has no name
            lock.truncate(0)
            os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        # This one is waited for: a server that looks holds it for a moment.
        fcntl.flock(awaited, fcntl.LOCK_EX)
        _empty(folder)
        try:
            yield folder
        finally:
            _empty(folder)


def is_awaited(folder: Path) -> bool:
    """Whether a client uses `folder` now. For the server; it never makes a client's lock fail."""
    with _unless_awaited(folder) as nobody:
        return not nobody


def empty_unless_awaited(folder: Path) -> None:
    """Delete what is left in `folder`, unless a client uses it. For a server that outlasts its clients."""
    with _unless_awaited(folder) as nobody:
        if nobody and folder.is_dir():
            _empty(folder)


@contextlib.contextmanager
def _unless_awaited(folder: Path) -> Iterator[bool]:
    """Whether nobody uses `folder`; a client that comes now waits until this is left."""
    try:
        awaited = (folder / _AWAITED_NAME).open()
    except FileNotFoundError:  # no client was ever here, or the folder is gone
        yield True
        return
    with awaited:
        try:
            fcntl.flock(awaited, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


async def wait_for_file(path: Path, limit_s: float) -> None:
    """Return when `path` is there, which means complete; the mark of a failed write is removed.

    Raises NotEnoughRoom (the disk is full), WriteFailed (it was not written for another reason) and
    TimeoutError (not there, and no mark, after `limit_s` seconds).
    """
    pause, longest = _POLL_S
    deadline = asyncio.get_running_loop().time() + limit_s
    while not path.exists():
        if (mark := path.with_name(path.name + NO_ROOM_SUFFIX)).exists():
            mark.unlink()
            raise NotEnoughRoom(
                f"the disk of {path.parent} is full: the server could not write hidden states there. Free "
                "some space and materialise again: finished shards and parts are kept."
            )
        if (mark := path.with_name(path.name + FAILED_SUFFIX)).exists():
            said = mark.read_text()
            mark.unlink()
            raise WriteFailed(f"the server could not write {path.name}: {said}")
        if asyncio.get_running_loop().time() > deadline:
            raise TimeoutError(f"{path} was named {limit_s:.0f} s ago and is not there")
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, longest)


def _empty(folder: Path) -> None:
    """Delete what a server left here; anything of another kind is not ours and stays."""
    for path in folder.iterdir():
        if path.is_file() and FILE_SUFFIX in path.suffixes:
            path.unlink(missing_ok=True)
