"""Opening a vLLM server: attach to the running one of the same fingerprint, or start it and wait.

    lease of the GPUs -> stop idle servers in the way -> attach or start -> ready -> use -> free the lease

The server goes on after that, for the next shard or step; its watcher stops it when nobody uses it.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eagle3_pipeline.errors import (
    Busy,
    Eagle3Error,
    ServerError,
    ServerNotReady,
    ServerStalled,
    ServerStopped,
)
from eagle3_pipeline.serving.gpus import physical_gpus
from eagle3_pipeline.serving.host_state import open_shared, state_folder
from eagle3_pipeline.serving.lease import hold_lease, try_hold
from eagle3_pipeline.serving.liveness import watch_liveness
from eagle3_pipeline.serving.readiness import check_alive, wait_until_ready
from eagle3_pipeline.serving.record import ServerRecord, Stage, all_records
from eagle3_pipeline.serving.specification import ServerSpec
from eagle3_pipeline.serving.starting import start_server, watch_server
from eagle3_pipeline.serving.stopping import stop_overlapping, stop_server

logger = logging.getLogger(__name__)

# A server that was ready once answers fast; under full load on few cores it may take some seconds.
_ATTACH_LIMIT_S = 60.0
_DRAIN_POLL_S = 1.0


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready and held. Requests go to `{base_url}/v1/...` and name `model`."""

    base_url: str
    """`http://127.0.0.1:<port>`, without /v1."""
    model: str
    """The served name."""
    spec: ServerSpec
    pid: int
    log: Path
    record: ServerRecord

    def check_alive(self) -> None:
        """Raise ServerDied, with the last lines of the log, if the server's process ended.

        ServerStalled if it was ended for making no tokens, ServerStopped if a person stopped it.
        """
        check_alive(self.record)


@contextmanager
def open_server(spec: ServerSpec, log_folder: Path, *, stop: bool = False) -> Iterator[RunningServer]:
    """Hold a ready server of `spec`; wait for the GPUs, stop what is in the way, attach or start, as needed.

    On leaving, the server goes on. With `stop` it is stopped, also when the body fails or is interrupted,
    unless somebody else uses it; that takes 45 s at most, and one minute more where a driver is slow.

    Raises:
        RecipeError: GPUs that are not there.
        ServerRefused: it cannot start with these settings; the cause and the log's last lines are in it.
        ServerDied: its process ended while loading.
        ServerStalled: it was ready once and answers no more; it was stopped.
        ServerStopped: a person stopped it while it was loading.
        ServerNotReady: alive, but not ready in time; it was stopped.
        Busy: a server of another container or user has the GPUs, or strangers have their memory.
    """
    gpus = physical_gpus(spec.partition)
    try:
        with _hold_lease(spec, gpus):
            record = _ready_record(spec, gpus, log_folder)
            assert record.process is not None
            with watch_liveness(record, spec.settings.stall_timeout_s):
                yield RunningServer(
                    base_url=record.base_url,
                    model=record.served_name,
                    spec=spec,
                    pid=record.process.pid,
                    log=Path(record.log),
                    record=record,
                )
    except BaseException:
        if stop:
            _stop_after_failure(spec)
        raise
    if stop:
        stop_servers(spec.partition, only=spec.fingerprint)
    else:
        idle_s = record.idle_timeout_s
        logger.info(
            "%s stays up for later steps and stops by itself after %.0f s without work", record, idle_s
        )


@contextmanager
def _hold_lease(spec: ServerSpec, gpus: tuple[str, ...]) -> Iterator[None]:
    """The lease of a server's users, once no such server is being drained: that takes no new users."""
    while True:
        if (record := _draining(spec)) is not None:
            logger.info("%s is being drained; a new one is started when its users are done", record)
        while _draining(spec) is not None:
            time.sleep(_DRAIN_POLL_S)
        with hold_lease(gpus, spec.fingerprint, f"{spec.phase} with {spec.served_name}"):
            if _draining(spec) is None:
                yield
                return


def _draining(spec: ServerSpec) -> ServerRecord | None:
    for record in all_records():
        if record.fingerprint == spec.fingerprint and record.state() == "draining":
            return record
    return None


def _stop_after_failure(spec: ServerSpec) -> None:
    try:
        stop_servers(spec.partition, only=spec.fingerprint)
    except Eagle3Error as error:  # what failed before is what the step has to tell
        logger.warning("%s", error)


def stop_servers(partition: tuple[str, ...], only: str | None = None) -> list[str]:
    """Stop the idle servers of ours that overlap a recipe's partition; returns their served names once gone.

    With `only`, a fingerprint, no others. A server that is in use is left alone, and said so. Raises
    RecipeError, ServerError, and Busy for servers of another user or container.
    """
    gpus = physical_gpus(partition)
    chosen = [one for one in all_records() if one.overlaps(gpus) and only in (None, one.fingerprint)]
    return [record.served_name for record in chosen if stop_if_unused(record)]


def running_servers() -> list[ServerRecord]:
    """The servers of ours that run on this machine or are just being started, of all users and recipes."""
    return [record for record in all_records() if record.process is None or record.alive()]


def stop_if_unused(record: ServerRecord) -> bool:
    """Stop a server of ours and verify that it is gone, unless somebody holds its lease; says which.

    Raises ServerError, and Busy for a server of another user or container.
    """
    with try_hold(record.gpus, f"stopping {record.served_name}") as free:
        if free:
            stop_server(record)
            return True
    logger.info("%s is in use and left alone", record)
    return False


def retire(record: ServerRecord, *, force: bool = False) -> Stage | None:
    """Stop a server because a person wants it; None once it is gone, else the stage that it stays in.

    One in use is drained: its watcher stops it when its users are done. With `force` it ends at once, and
    its users get ServerStopped, which no step retries. Raises ServerError, and Busy for a server of another
    user or container.
    """
    with try_hold(record.gpus, f"stopping {record.served_name}") as free:
        if free:
            stop_server(record)
            return None
    if force:
        stop_server(record, ServerStopped(f"{record} was stopped by hand while it was in use."))
        return None
    return record.amend(only_from="ready", stage="draining").stage


def _ready_record(spec: ServerSpec, gpus: tuple[str, ...], log_folder: Path) -> ServerRecord:
    with _start_lock(spec.fingerprint):
        stop_overlapping(gpus, keep=spec.fingerprint)
        record = _attach(spec) or start_server(spec, gpus, log_folder)
    loading_s = time.time() - record.started_at
    limit_s = _ATTACH_LIMIT_S if record.ready else spec.settings.start_timeout_s - loading_s
    try:
        wait_until_ready(record, limit_s, f"server.{spec.phase}.start_timeout_s")
    except ServerError as error:
        # Dead with children left, or alive but useless: neither may keep the GPUs. An interruption of this
        # step is no reason: the server goes on loading for the next one.
        if isinstance(error, ServerNotReady) and record.ready:  # it hung; a new one has a chance
            error = ServerStalled(f"{error} It was stopped.")
        try:
            stop_server(record, error)
        except ServerError as also:
            raise type(error)(f"{error}\nEnding it failed as well: {also}") from None
        raise error from None
    return record if record.ready else record.amend(only_from="starting", stage="ready")


@contextmanager
def _start_lock(fingerprint: str) -> Iterator[None]:
    """One process at a time looks for the server of a fingerprint and starts it; it does not wait in here."""
    descriptor = open_shared(state_folder("leases") / f"start-{fingerprint[:12]}.lock", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _attach(spec: ServerSpec) -> ServerRecord | None:
    """The running server of the same fingerprint, watched; leftovers of a dead one are ended."""
    for record in list(all_records()):
        if record.fingerprint != spec.fingerprint:
            continue
        if record.foreign:
            raise Busy(
                f"{record} has these GPUs and cannot be used from here. "
                "Run one container per machine, or wait until it stops by itself."
            )
        if not record.alive() or record.stage in ("stopping", "failed"):
            stop_server(record)
            continue
        logger.info("using %s, which runs since %.0f s", record, time.time() - record.started_at)
        if record.uid == os.getuid() and not (record.watcher and record.watcher.alive()):
            record = watch_server(record)
        return record
    return None
