"""Leases on GPUs: OS locks, so that a process that dies, however it dies, holds nothing.

One lock per GPU (or one called `cpu`), taken in sorted order, so that two takers of several never wait for
each other. A lease is exclusive, or shared among users of the very same server fingerprint. Per lease::

    <gpu>.lock      flock: who holds the GPU
    <gpu>.guard     flock, held for an instant: one taker at a time looks and decides
    <gpu>.holders   who holds it, in words (holders.py); its time stamp is the last time that somebody took
                    or left the lease, or was seen holding it

Within one process a lease that is held alone, or for another fingerprint, is waited for like a stranger's:
do not nest them.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from eagle3_pipeline.serving.gpu_memory import read_memory, tell_strangers
from eagle3_pipeline.serving.gpus import physical_gpus
from eagle3_pipeline.serving.holders import Holder, lease_path, read_holders, write_holders
from eagle3_pipeline.serving.host_state import is_locked, open_shared, state_folder
from eagle3_pipeline.serving.stopping import stop_overlapping

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_NEWS_EVERY_S = 10.0
# GPUs that this very process holds alone; a lock of ours would look like a stranger's otherwise.
_held_alone: set[str] = set()


@contextmanager
def hold_partition(gpus: tuple[str, ...], purpose: str) -> Iterator[None]:
    """Hold a recipe's partition alone, once idle servers of ours on it are stopped. Waits for its holders.

    `gpus` as the recipe names them, () the CPU; `purpose` is what waiting processes tell people.
    Raises RecipeError for GPUs that are not there.
    """
    physical = physical_gpus(gpus)
    with hold_lease(physical, None, purpose):
        stop_overlapping(physical)
        tell_strangers(read_memory(physical))
        yield


@contextmanager
def hold_lease(gpus: tuple[str, ...], fingerprint: str | None, purpose: str) -> Iterator[None]:
    """Hold the leases of physical GPUs: shared with users of the same `fingerprint`, alone with None."""
    names = lease_names(gpus)
    with ExitStack() as stack:
        for name in names:
            descriptor = _wait_for(name, fingerprint, purpose)
            stack.callback(_leave, name, descriptor)
        if fingerprint is None:
            _held_alone.update(names)
            stack.callback(_held_alone.difference_update, names)
        yield


@contextmanager
def try_hold(gpus: tuple[str, ...], purpose: str) -> Iterator[bool]:
    """Hold the leases of physical GPUs alone if they are all free at once, or held alone by this process."""
    with ExitStack() as stack:
        for name in lease_names(gpus):
            if name in _held_alone:
                continue
            descriptor = _try(name, None, purpose)
            if descriptor is None:
                stack.close()
                yield False
                return
            stack.callback(os.close, descriptor)
        yield True


def last_used(gpus: tuple[str, ...]) -> float:
    """When the first of these GPUs was used last, in seconds since the epoch: now, if it is held.

    After a holder was killed: when note_use saw it last.
    """
    name = lease_names(gpus)[0]
    with _guard(name):
        if is_locked(lease_path(name, "lock")):
            return time.time()
        holders = lease_path(name, "holders")
        return holders.stat().st_mtime if holders.exists() else 0.0


def note_use(gpus: tuple[str, ...]) -> None:
    """Make now the last use of the first of these GPUs if it is held: who is killed cannot say when."""
    name = lease_names(gpus)[0]
    with _guard(name):
        if is_locked(lease_path(name, "lock")):
            with contextlib.suppress(FileNotFoundError):  # its holder was killed before it wrote its name
                os.utime(lease_path(name, "holders"))


def lease_names(gpus: tuple[str, ...]) -> list[str]:
    """Names of the leases of physical GPUs, in the order of taking."""
    return sorted({f"gpu-{gpu.replace('/', '_')}" for gpu in gpus}) or ["cpu"]


def holders(gpus: tuple[str, ...]) -> list[Holder]:
    """Who holds the leases of these physical GPUs now."""
    return [holder for name in lease_names(gpus) for holder in _holders(name)]


def all_holders() -> list[Holder]:
    """Who holds any lease of this machine now, of all users and recipes."""
    names = sorted(path.stem for path in state_folder("leases").glob("*.holders"))
    return [holder for name in names for holder in _holders(name)]


def _holders(name: str) -> list[Holder]:
    with _guard(name):
        return read_holders(name).holders if is_locked(lease_path(name, "lock")) else []


def _wait_for(name: str, fingerprint: str | None, purpose: str) -> int:
    began = told = time.monotonic()
    while (descriptor := _try(name, fingerprint, purpose)) is None:
        if time.monotonic() - told >= _NEWS_EVERY_S or told == began:
            told = time.monotonic()
            words = ", ".join(map(str, _holders(name))) or "a process that left no name"
            logger.info("%s waits for %s since %.0f s: held by %s", purpose, name, told - began, words)
        time.sleep(_POLL_S)
    return descriptor


def _try(name: str, fingerprint: str | None, purpose: str) -> int | None:
    """The locked descriptor of a lease, or None when it is held and cannot be shared."""
    with _guard(name):
        lock = open_shared(lease_path(name, "lock"), os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                others = []
            except BlockingIOError:
                found = read_holders(name)
                if fingerprint is None or found.fingerprint != fingerprint:
                    os.close(lock)
                    return None
                others = found.holders
            if fingerprint is not None:
                # From exclusive to shared is no single step for the kernel; the guard keeps others out.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            write_holders(name, fingerprint, [*others, Holder.this_process(name, purpose)])
        except BlockingIOError:  # held alone by a process that was killed before it wrote its name
            os.close(lock)
            return None
        return lock


def _leave(name: str, descriptor: int) -> None:
    # Closing frees the lock, whatever happens; the time stamp starts the idle time of the server.
    try:
        with contextlib.suppress(OSError), _guard(name):
            found = read_holders(name)
            ours = next((one for one in found.holders if one.here and one.pid == os.getpid()), None)
            write_holders(name, found.fingerprint, [one for one in found.holders if one is not ours])
    finally:
        os.close(descriptor)


@contextmanager
def _guard(name: str) -> Iterator[None]:
    descriptor = open_shared(lease_path(name, "guard"), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
