"""A process that ends with the one that started it, by the kernel's word: kill -9 of the parent included.

And that hears when it is asked to end.
"""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def interrupt_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its parent ends, however that ends."""
    heed_signals()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def heed_signals() -> None:
    """Undo that SIGINT and SIGTERM are ignored, before a program is run or a step begins.

    A shell without job control starts `command &` with SIGINT ignored, which children inherit; Dagster then
    treats SIGTERM like it. Such a run could not be interrupted, nor could its servers be asked to end.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
