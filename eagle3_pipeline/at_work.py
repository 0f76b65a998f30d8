"""Whether anybody works on a recipe: each step holds a lock below the recipe's folder while it does.

The lock ends with its process, however that ends, and it is there for whoever asks on the same disk: from
another Dagster instance, another container or the command line. What a scheduler believes of its runs is not.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = "at_work.lock"


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """Say that a step works in a recipe's folder; several may, beside each other.

    The folder is made where it is missing, for this user alone: prompts and replies may be private.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / _LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def is_at_work(folder: Path) -> bool:
    """Whether any process, this one included, works in a recipe's folder, which need not be there."""
    try:
        file = (folder / _LOCK).open("rb")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
