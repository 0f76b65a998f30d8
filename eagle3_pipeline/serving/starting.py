"""Starting a server with its watcher. Whoever calls this holds the lease.

The record is written first, then the watcher is started, then the server. So there is no moment at which a
kill leaves a server without a watcher or without a record.
"""

import logging
import os
import socket
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

from eagle3_pipeline.child_environment import without_secrets
from eagle3_pipeline.errors import ServerRefused, ServerStopped
from eagle3_pipeline.serving.gpu_memory import require_memory
from eagle3_pipeline.serving.process import MARKER_VARIABLE, ProcessIdentity, describe, start_process
from eagle3_pipeline.serving.record import ServerRecord, new_record
from eagle3_pipeline.serving.specification import ServerSpec, import_path
from eagle3_pipeline.serving.stopping import stop_server

logger = logging.getLogger(__name__)

SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"


def start_server(spec: ServerSpec, gpus: tuple[str, ...], log_folder: Path) -> ServerRecord:
    """Start the server of `spec` on physical GPUs, watched.

    Raises ServerRefused when it cannot be run, Busy when others have the memory of the GPUs.
    """
    require_memory(gpus, spec.settings.gpu_memory_utilization)
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
    try:
        record = watch_server(record)
        record = record.amend(process=_run(spec, record))
        if record.process is None or record.stage != "starting":
            raise ServerStopped(f"{record} was stopped by hand while it was being started.")
    except BaseException:
        stop_server(record)  # an interrupted start too: the marker finds what came of it
        raise
    logger.info("started %s; its log is %s", record, record.log)
    return record


def watch_server(record: ServerRecord) -> ServerRecord:
    """Start a watcher for the server of a record of this user; the record with it in, written."""
    argv = (sys.executable, "-m", "eagle3_pipeline.serving.watcher", str(record.path))
    env = without_secrets(os.environ)
    if (path := import_path()) is not None:
        env["PYTHONPATH"] = path
    log = Path(record.log).with_suffix(".watcher.log")
    with record.hold_life() as life:
        watcher = start_process(argv, env, log, Path("/"), keep=(life,))
    return record.amend(watcher=watcher)


def _run(spec: ServerSpec, record: ServerRecord) -> ProcessIdentity:
    record.scratch.mkdir(mode=0o700)
    # VLLM_API_KEY is a secret, too: it would lock out our own requests; the server is on the loopback only.
    inherited = without_secrets(os.environ)
    env = {**_scratch(record.scratch), **inherited, SOCKETS_VARIABLE: str(record.scratch)}
    env |= {**spec.env, MARKER_VARIABLE: record.marker}
    argv = (*spec.argv, "--port", str(record.port))
    log = Path(record.log)
    try:
        with record.hold_life() as life:
            return start_process(argv, env, log, log.parent, keep=(life,))
    except OSError as error:
        raise ServerRefused(
            f"{argv[0]} cannot be run ({error.strerror}). "
            f"Set server.{spec.phase}.python to a Python that has vLLM."
        ) from error


def _scratch(folder: Path) -> dict[str, str]:
    """Temporary files go where they are removed with the server, but compiled code stays for the next one."""
    return {
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}",
    }


def _free_port(spec: ServerSpec) -> int:
    """The recipe's port, or a free one. Raises ServerRefused, naming who holds the recipe's port."""
    wanted = spec.settings.port
    if wanted is not None:
        if (holder := holder_of_port(wanted)) is not None:
            raise ServerRefused(
                f"port {wanted} of server.{spec.phase}.port is held by {holder}. "
                "End that, choose another port, or leave the port out to get a free one."
            )
        return wanted
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def holder_of_port(port: int) -> str | None:
    """Who keeps a server from taking a port of the loopback address, in words; None when it is free."""
    with socket.socket() as probe:
        # As the server does it: connections that just ended (TIME_WAIT) hold no port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            return None
        except OSError:
            pass
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or not connection.laddr:
            continue
        if connection.laddr.port == port and connection.pid:
            return describe(connection.pid)
    return "a process of another user (see `ss -ltnp` as root)"
