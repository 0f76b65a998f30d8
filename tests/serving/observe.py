"""What tests see and do of servers from outside."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from eagle3_pipeline.serving.process import find_family
from eagle3_pipeline.serving.record import ServerRecord
from eagle3_pipeline.serving.server import open_server
from eagle3_pipeline.serving.specification import ServerSpec


def family_of(record: ServerRecord) -> list[int]:
    return [process.pid for process in find_family(record.process, record.marker)]


def use_server(spec: ServerSpec, folder: Path, seconds: float) -> None:
    with open_server(spec, folder) as server:
        (folder / f"pid-{os.getpid()}").write_text(json.dumps(server.pid))
        time.sleep(seconds)


def freeze_watcher(record: ServerRecord) -> None:
    assert record.watcher is not None
    record.watcher.send(signal.SIGKILL)


def wait_for(done: Callable[[], bool], limit_s: float = 10) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
