"""What runs, on disk: one JSON file per server, written whole, compared with reality whenever it is read.

    absent -> starting -> ready -> (draining) -> stopping -> absent
                  |         |          |
                  +---------+----------+-> failed -> absent, when its GPUs are used again

A record is written before its process is started (`process` is null then): whatever is killed when, the
marker in it finds the processes. Who uses a server is not in its record but in the leases of its GPUs.

Process ids mean nothing in another pid namespace (another container that shares the host state), and a port
nothing in another network namespace. There the `.life` file tells: the server and its watcher keep it locked,
and the kernel frees a lock when its last holder is gone, in whatever namespace. So a server of another
container is left alone as long as it lives, and those of a container that ended are forgotten.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from eagle3_pipeline.durable_files import write_json
from eagle3_pipeline.serving.gpus import overlap
from eagle3_pipeline.serving.host_state import is_locked, open_shared, state_folder
from eagle3_pipeline.serving.process import ProcessIdentity, boot_id, pid_namespace

Stage = Literal["starting", "ready", "draining", "stopping", "failed"]
"""`draining`: it works for its users, takes no new ones, and is stopped after the last."""

_FORMAT = 2
# A constant and short: the path of a unix socket has at most 107 bytes, 37 of which are vLLM's.
_SCRATCH = Path("/tmp")


@dataclass(frozen=True)
class ServerRecord:
    """One server: who it is, where it runs, how long it may idle. `gpus` are physical names, () the CPU."""

    fingerprint: str
    served_name: str
    phase: str
    gpus: tuple[str, ...]
    port: int
    log: str
    marker: str
    """Value of EAGLE3_SERVER in the environment of all its processes."""
    idle_timeout_s: float
    started_at: float
    """Seconds since the epoch."""
    boot_id: str
    namespace: str
    """The pid namespace of its processes."""
    starter: ProcessIdentity
    """The step that starts it; while that lives, a record without a process is none to clear up."""
    process: ProcessIdentity | None = None
    watcher: ProcessIdentity | None = None
    stage: Stage = "starting"
    failure: str = ""
    """Name of the class in errors.py that tells how it failed."""
    reason: str = ""
    """How it failed, in words."""
    uid: int = 0
    format: int = _FORMAT

    @property
    def ready(self) -> bool:
        """Whether it was ready, whatever it is now."""
        return self.stage in ("ready", "draining")

    @property
    def path(self) -> Path:
        """Its file, with a name per user: in a sticky folder nobody can replace another user's file."""
        return state_folder("servers") / f"{self.served_name}-{self.uid}.json"

    @property
    def base_url(self) -> str:
        """Without `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def life(self) -> Path:
        """The file that the server and its watcher keep locked while they live."""
        return self.path.with_suffix(f".{self.marker[:12]}.life")

    @property
    def scratch(self) -> Path:
        """The folder for vLLM's unix sockets and temporary files, which vLLM leaves behind when it ends."""
        return _SCRATCH / f"eagle3-ipc-{self.marker[:12]}"

    @property
    def foreign(self) -> bool:
        """Whether it runs in another pid namespace, where its processes can be neither seen nor ended."""
        return self.namespace != pid_namespace()

    def alive(self) -> bool:
        """Whether its very process runs; of a foreign server, whether it or its watcher does."""
        if self.foreign:
            return is_locked(self.life)
        return self.process is not None and self.process.alive()

    def state(self) -> Stage:
        """Its stage, unless reality differs: a server whose process is gone has failed."""
        if self.stage == "failed" or self.alive() or (self.process is None and self.starter.alive()):
            return self.stage
        return "failed"

    def amend(self, *, only_from: Stage | None = None, **changes: object) -> "ServerRecord":
        """Write the record as it is on disk by now with `changes`; nothing if it tells of another server.

        Steps, watchers and people change a record: each only its own fields, one after the other; with
        `only_from`, only a record that is still in this stage. A record of another user is left as it is,
        for that user's processes keep it.
        """
        with _one_at_a_time():
            now = read_record(self.path)
            if now is None or now.marker != self.marker or now.uid != os.getuid():
                return self
            if only_from not in (None, now.stage):
                return now
            record = dataclasses.replace(now, **changes)  # type: ignore[arg-type]
            record.write()
            return record

    def fail(self, error: Exception) -> "ServerRecord":
        """Keep how it failed, for the steps that used it and for people; the first reason stands."""
        now = read_record(self.path)
        if now is not None and now.marker == self.marker and now.failure:
            return now
        return self.amend(stage="failed", failure=type(error).__name__, reason=str(error))

    @contextmanager
    def hold_life(self) -> Iterator[int]:
        """A descriptor that keeps `life` locked in all processes that inherit it."""
        descriptor = open_shared(self.life, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield descriptor
        finally:
            os.close(descriptor)

    def overlaps(self, gpus: tuple[str, ...]) -> bool:
        """Whether it uses one of these GPUs; two on the CPU always overlap."""
        return overlap(self.gpus, gpus)

    def write(self) -> None:
        """Write it, whole or not at all, readable for all users."""
        write_json(self.path, asdict(self))
        self.path.chmod(0o644)

    def remove(self) -> None:
        """Forget the server, with what it left in its scratch folder.

        A file that tells of another server by now, or belongs to another user, stays.
        """
        self.tidy()
        now = read_record(self.path)
        if now is not None and now.marker == self.marker:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                self.path.unlink()

    def tidy(self) -> None:
        """Remove what only a living server needs."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError, PermissionError):
            self.life.unlink()

    def __str__(self) -> str:
        where = f"GPUs {','.join(self.gpus)}" if self.gpus else "the CPU"
        process = f"pid {self.process.pid}" if self.process else "just being started"
        there = f" of another container, {self.namespace}" if self.foreign else ""
        return f"{self.phase} server {self.served_name} on {where} ({process}{there}, port {self.port})"


def read_record(path: Path) -> ServerRecord | None:
    """The record in a file; None when there is none of this format, or one in somebody else's name."""
    try:
        with open(path, opener=_no_link) as file:
            owner = os.fstat(file.fileno()).st_uid
            value = json.load(file)
        if owner not in (value["uid"], 0):  # it would have that user's processes ended
            return None
        if value["format"] != _FORMAT or not value["marker"].isalnum():  # it becomes part of paths
            return None
        if value["stage"] not in get_args(Stage):
            return None
        for name in ("starter", "process", "watcher"):
            value[name] = ProcessIdentity(**value[name]) if value[name] else None
        return ServerRecord(**{**value, "gpus": tuple(value["gpus"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def all_records() -> Iterator[ServerRecord]:
    """The records of this boot, whether their servers live or not.

    Those of earlier boots are forgotten, and those of other pid namespaces (containers) that do not live.
    """
    for path in sorted(state_folder("servers").glob("*.json")):
        record = read_record(path)
        if record is None:
            continue
        if record.boot_id == boot_id() and (not record.foreign or record.alive()):
            yield record
        else:
            record.remove()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    descriptor = os.open(state_folder("servers"), os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def new_record(**values: object) -> ServerRecord:
    """A record of a server about to be started by this process, now."""
    starter = ProcessIdentity.of(os.getpid())
    assert starter is not None  # it is this very process
    return ServerRecord(
        **values,  # type: ignore[arg-type]
        started_at=time.time(),
        boot_id=boot_id(),
        namespace=pid_namespace(),
        starter=starter,
        uid=os.getuid(),
    )
