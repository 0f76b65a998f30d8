"""What runs, on disk: one JSON file per server, written whole, compared with reality whenever it is read.

A record is written before its process is started (`process` is null then): whatever is killed when, the
marker in it finds the processes.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle3_pipeline.durable_files import write_json
from eagle3_pipeline.serving.host_state import state_folder
from eagle3_pipeline.serving.process import ProcessIdentity, boot_id

_FORMAT = 1


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
    process: ProcessIdentity | None = None
    watcher: ProcessIdentity | None = None
    ready: bool = False
    uid: int = 0
    format: int = _FORMAT

    @property
    def path(self) -> Path:
        """Its file, with a name per user: in a sticky folder nobody can replace another user's file."""
        return state_folder("servers") / f"{self.served_name}-{self.uid}.json"

    @property
    def base_url(self) -> str:
        """Without `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    def alive(self) -> bool:
        """Whether its very process runs."""
        return self.process is not None and self.process.alive()

    def overlaps(self, gpus: tuple[str, ...]) -> bool:
        """Whether it uses one of these GPUs; two on the CPU always overlap."""
        return bool(set(self.gpus) & set(gpus)) or (not self.gpus and not gpus)

    def write(self) -> None:
        """Write it, whole or not at all, readable for all users."""
        write_json(self.path, asdict(self))
        self.path.chmod(0o644)

    def remove(self) -> None:
        """Forget the server, unless its file tells of another one by now or belongs to another user."""
        now = read_record(self.path)
        if now is not None and now.marker == self.marker:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                self.path.unlink()

    def __str__(self) -> str:
        where = f"GPUs {','.join(self.gpus)}" if self.gpus else "the CPU"
        pid = self.process.pid if self.process else "not started"
        return f"{self.phase} server {self.served_name} on {where} (pid {pid}, port {self.port})"


def read_record(path: Path) -> ServerRecord | None:
    """The record in a file; None when there is none of this format."""
    try:
        value = json.loads(path.read_text())
        if value["format"] != _FORMAT:
            return None
        for name in ("process", "watcher"):
            value[name] = ProcessIdentity(**value[name]) if value[name] else None
        return ServerRecord(**{**value, "gpus": tuple(value["gpus"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def all_records() -> Iterator[ServerRecord]:
    """The records of this boot, whether their servers live or not; those of earlier boots are forgotten."""
    for path in sorted(state_folder("servers").glob("*.json")):
        record = read_record(path)
        if record is None:
            continue
        if record.boot_id == boot_id():
            yield record
        else:
            record.remove()


def new_record(**values: object) -> ServerRecord:
    """A record of a server about to be started by this user, now."""
    return ServerRecord(**values, started_at=time.time(), boot_id=boot_id(), uid=os.getuid())  # type: ignore[arg-type]
