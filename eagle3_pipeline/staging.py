"""The staging folder between the vLLM server and the capturing client: names, lock, emptying.

Files live in it from the server's write to the client's read, so it holds at most a few files per
sample in flight. It is used by one process at a time and is empty before and after.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from eagle3_pipeline.errors import Busy

FILE_SUFFIX = ".safetensors"
NO_ROOM_SUFFIX = ".no-room"
FAILED_SUFFIX = ".failed"
_LOCK_NAME = "staging.lock"


def temporary_name(path: Path) -> Path:
    """Where the file `path` is written before it gets its name."""
    return path.with_name(f".{path.name}.tmp")


@contextlib.contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """Make `folder`, lock it, empty it, yield it and empty it again; raises Busy."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK_NAME).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Busy(
                f"another process captures hidden states through {folder}. Wait for it or stop it."
            ) from error
        _empty(folder)
        try:
            yield folder
        finally:
            _empty(folder)


def _empty(folder: Path) -> None:
    """Delete what a server left here; anything of another kind is not ours and stays."""
    for path in folder.iterdir():
        if path.is_file() and FILE_SUFFIX in path.suffixes:
            path.unlink(missing_ok=True)
