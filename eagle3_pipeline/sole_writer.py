"""One process at a time writes a folder: the second is told, and does not wait."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3_pipeline.errors import Busy


@contextmanager
def sole_writer(lock: Path, taken: str) -> Iterator[None]:
    """Hold the file `lock`, which stays; raises Busy with the sentence `taken` where another does."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Busy(f"{taken}. Wait for it or stop it.") from error
        yield
