"""What tests see and do of servers from outside."""

import json
import os
import time
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
