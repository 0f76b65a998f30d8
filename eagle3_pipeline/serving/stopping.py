"""Stopping servers of ours, and verifying that they are gone. Whoever calls this holds the lease."""

import contextlib
import logging
import os
import signal
import time
from pathlib import Path

from eagle3_pipeline.errors import Busy, ServerError
from eagle3_pipeline.serving.gpu_memory import read_memory, wait_for_memory
from eagle3_pipeline.serving.process import end_family
from eagle3_pipeline.serving.record import ServerRecord, all_records

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")


def stop_server(record: ServerRecord, failure: ServerError | None = None) -> list[int]:
    """End all processes of a server and forget it once its memory is back; returns the pids ended.

    With `failure` the record stays, as one that failed like that, until its GPUs are used again.

    Raises ServerError when a process cannot be ended or memory of a GPU does not come back, Busy when it is
    another user's or another container's.
    """
    if record.foreign:
        raise Busy(
            f"{record} can only be stopped where it runs. "
            "Run `eagle3 server stop` in that container, or wait until it stops by itself."
        )
    began = time.monotonic()
    if failure is None:
        record.amend(stage="stopping")
    else:
        record.fail(failure)
    before = read_memory(record.gpus)
    ended = end_family(record.process, record.marker, loading=record.stage == "starting")
    wait_for_memory(before, ended, was_ready=record.ready)
    _remove_segments(record)
    if failure is None:
        record.remove()
    else:
        record.tidy()
    if record.watcher is not None and record.watcher.pid != os.getpid():
        record.watcher.send(signal.SIGTERM)  # it would end by itself at its next look
    if ended:
        logger.info("stopped %s: %d processes in %.1f s", record, len(ended), time.monotonic() - began)
    return ended


def _remove_segments(record: ServerRecord) -> None:
    """Remove shared memory that ranks on a CPU leave when they are killed.

    They name it after the file at which they met, which a kill leaves too.
    """
    for meeting in record.scratch.glob("vllm_dist_*"):
        for segment in _SHARED_MEMORY.glob(f"{meeting.name}-*"):
            with contextlib.suppress(OSError):
                segment.unlink()


def stop_overlapping(gpus: tuple[str, ...], keep: str | None = None) -> list[str]:
    """Stop each server of ours on these physical GPUs, but not the fingerprint `keep`; returns served names.

    The caller holds a lease on them, and a user of a server holds the leases of all its GPUs: so nobody uses
    a server that overlaps. Leftovers of dead servers are ended too. Raises ServerError.
    """
    stopped = []
    for record in all_records():
        if record.overlaps(gpus) and record.fingerprint != keep and stop_server(record):
            stopped.append(record.served_name)
    return stopped
