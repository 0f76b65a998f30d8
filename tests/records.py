"""Records of servers that were never started, for tests of what is shown and found of servers."""

import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from eagle3_pipeline.serving.process import ProcessIdentity
from eagle3_pipeline.serving.record import ServerRecord, new_record


@contextmanager
def process_of_a_server(marker: str = "") -> Iterator[ProcessIdentity]:
    """A process that lives until it is let go; with `marker`, one that carries a server's mark."""
    env = {"EAGLE3_SERVER": marker} if marker else None
    process = subprocess.Popen(["/bin/sleep", "600"], env=env)
    try:
        identity = ProcessIdentity.of(process.pid)
        assert identity is not None
        yield identity
    finally:
        process.kill()
        process.wait()


def write_record(process: ProcessIdentity | None, **changes: Any) -> ServerRecord:
    """Write the record of a generation server that is ready, on the CPU unless said otherwise."""
    marker = changes.setdefault("marker", uuid.uuid4().hex)
    changes.setdefault("stage", "ready")
    record = new_record(
        fingerprint=marker,
        served_name=f"eagle3-{marker[:12]}",
        phase="generation",
        gpus=(),
        port=1024,
        log="/nowhere/server.log",
        marker=marker,
        idle_timeout_s=600,
    )
    record = replace(record, process=process, **changes)
    record.write()
    return record
