"""A process that ends with the one that started it, by the kernel's word: kill -9 of the parent included."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def interrupt_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
