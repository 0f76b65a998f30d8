"""How the training process ends before its time: at once with its parent, in order when it is asked to."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def end_with_parent() -> None:
    """End this process at once when stdin is closed: its parent holds the other end, and is gone."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1 << 12):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()


@contextmanager
def heed_sigterm() -> Iterator[Callable[[], bool]]:
    """SIGTERM is remembered instead of ending this process; gives the question whether it came."""
    asked = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
