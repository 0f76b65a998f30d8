"""Opening a vLLM server: attach to the running one of the same fingerprint, or start it and wait.

    lease of the GPUs -> stop idle servers in the way -> attach or start -> ready -> use -> free the lease

The server goes on after that, for the next shard or step; its watcher stops it when nobody uses it.
"""

import dataclasses
import fcntl
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from eagle3_pipeline.errors import ServerError, ServerNotReady, ServerRefused
from eagle3_pipeline.serving.gpus import physical_gpus
from eagle3_pipeline.serving.host_state import open_shared, state_folder
from eagle3_pipeline.serving.lease import hold_lease, try_hold
from eagle3_pipeline.serving.process import MARKER_VARIABLE, ProcessIdentity, describe, start_process
from eagle3_pipeline.serving.readiness import check_alive, wait_until_ready
from eagle3_pipeline.serving.record import ServerRecord, all_records, new_record
from eagle3_pipeline.serving.specification import ServerSpec, import_path
from eagle3_pipeline.serving.stopping import stop_overlapping, stop_server

logger = logging.getLogger(__name__)

# A server that was ready once answers fast; under full load on few cores it may take some seconds.
_ATTACH_LIMIT_S = 60.0


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
        """Raise ServerDied, with the last lines of the log, if the server's process ended."""
        check_alive(self.record)


@contextmanager
def open_server(spec: ServerSpec, log_folder: Path, *, stop: bool = False) -> Iterator[RunningServer]:
    """Hold a ready server of `spec`; wait for the GPUs, stop what is in the way, attach or start, as needed.

    On leaving, the server goes on, unless `stop` is given and nobody else uses it.

    Raises:
        RecipeError: GPUs that are not there.
        ServerRefused: it cannot start with these settings; the cause and the log's last lines are in it.
        ServerDied: its process ended while loading.
        ServerNotReady: alive, but not ready in time; it was stopped.
    """
    gpus = physical_gpus(spec.partition)
    with hold_lease(gpus, spec.fingerprint, f"{spec.phase} with {spec.served_name}"):
        record = _ready_record(spec, gpus, log_folder)
        assert record.process is not None
        yield RunningServer(
            base_url=record.base_url,
            model=record.served_name,
            spec=spec,
            pid=record.process.pid,
            log=Path(record.log),
            record=record,
        )
    if stop:
        stop_if_unused(record)
    else:
        idle_s = record.idle_timeout_s
        logger.info(
            "%s stays up for later steps and stops by itself after %.0f s without work", record, idle_s
        )


def stop_servers(partition: tuple[str, ...]) -> list[str]:
    """Stop the idle servers of ours that overlap a recipe's partition; returns their served names once gone.

    A server that is in use is left alone, and said so. Raises RecipeError and ServerError.
    """
    gpus = physical_gpus(partition)
    overlapping = [record for record in all_records() if record.overlaps(gpus)]
    return [record.served_name for record in overlapping if stop_if_unused(record)]


def running_servers() -> list[ServerRecord]:
    """The servers of ours that run on this machine, of all users and recipes."""
    return [record for record in all_records() if record.alive()]


def stop_if_unused(record: ServerRecord) -> bool:
    """Stop a server of ours and verify that it is gone, unless somebody holds its lease; says which."""
    with try_hold(record.gpus, f"stopping {record.served_name}") as free:
        if free:
            return bool(stop_server(record))
    logger.info("%s is in use and left alone", record)
    return False


def _ready_record(spec: ServerSpec, gpus: tuple[str, ...], log_folder: Path) -> ServerRecord:
    with _start_lock(spec.fingerprint):
        stop_overlapping(gpus, keep=spec.fingerprint)
        record = _attach(spec) or _start(spec, gpus, log_folder)
    loading_s = time.time() - record.started_at
    limit_s = _ATTACH_LIMIT_S if record.ready else spec.settings.start_timeout_s - loading_s
    try:
        wait_until_ready(record, limit_s, f"server.{spec.phase}.start_timeout_s")
    except ServerError as error:
        # Dead with children left, or alive but useless: neither may keep the GPUs. An interruption of this
        # step is no reason: the server goes on loading for the next one.
        stop_server(record)
        if isinstance(error, ServerNotReady):
            logger.warning("%s was stopped: not ready in time", record)
        raise
    if record.ready:
        return record
    record = dataclasses.replace(record, ready=True)
    if record.uid == os.getuid():
        record.write()
    return record


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
        if not record.alive():
            stop_server(record)
            continue
        logger.info("using %s, which runs since %.0f s", record, time.time() - record.started_at)
        if record.uid == os.getuid() and not (record.watcher and record.watcher.alive()):
            record = _watch(record)
        return record
    return None


def _start(spec: ServerSpec, gpus: tuple[str, ...], log_folder: Path) -> ServerRecord:
    log_folder = log_folder.absolute()
    log_folder.mkdir(parents=True, exist_ok=True)
    marker = uuid.uuid4().hex
    record = new_record(
        fingerprint=spec.fingerprint,
        served_name=spec.served_name,
        phase=spec.phase,
        gpus=gpus,
        port=_free_port(spec),
        log=str(log_folder / f"{spec.phase}-{time.strftime('%Y%m%dT%H%M%S')}-{marker[:6]}.log"),
        marker=marker,
        idle_timeout_s=spec.settings.idle_timeout_s,
    )
    record.write()
    # A key of the user's shell would lock out our own requests; the server listens on the loopback only.
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    env = {**inherited, **spec.env, MARKER_VARIABLE: marker}
    argv = (*spec.argv, "--port", str(record.port))
    try:
        process = start_process(argv, env, Path(record.log), log_folder)
    except OSError as error:
        record.remove()
        raise ServerRefused(
            f"{argv[0]} cannot be run ({error.strerror}). "
            f"Set server.{spec.phase}.python to a Python that has vLLM."
        ) from error
    record = dataclasses.replace(record, process=process)
    record.write()
    logger.info("started %s; its log is %s", record, record.log)
    return _watch(record)


def _watch(record: ServerRecord) -> ServerRecord:
    argv = (sys.executable, "-m", "eagle3_pipeline.serving.watcher", str(record.path))
    env = dict(os.environ)
    if (path := import_path()) is not None:
        env["PYTHONPATH"] = path
    log = Path(record.log)
    watcher: ProcessIdentity = start_process(argv, env, log.with_suffix(".watcher.log"), Path("/"))
    record = dataclasses.replace(record, watcher=watcher)
    record.write()
    return record


def _free_port(spec: ServerSpec) -> int:
    """The recipe's port, or a free one. Raises ServerRefused, naming who holds the recipe's port."""
    wanted = spec.settings.port or 0
    with socket.socket() as probe:
        # As the server does it: connections that just ended (TIME_WAIT) hold no port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            raise ServerRefused(
                f"port {wanted} of server.{spec.phase}.port is held by {_holder_of(wanted)}. "
                "End that, choose another port, or leave the port out to get a free one."
            ) from error
        return int(probe.getsockname()[1])


def _holder_of(port: int) -> str:
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or not connection.laddr:
            continue
        if connection.laddr.port == port and connection.pid:
            return describe(connection.pid)
    return "a process of another user (see `ss -ltnp` as root)"
