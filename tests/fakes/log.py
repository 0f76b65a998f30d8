"""The stand-in's two logs: lines as vLLM's for people on standard error, JSON lines for tests to count."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def say(text: str) -> None:
    """One line as vLLM writes it: `(APIServer pid=1) INFO 01-31 12:00:00 [file.py:1] text`."""
    stamp = time.strftime("%m-%d %H:%M:%S")
    sys.stderr.write(f"(APIServer pid={os.getpid()}) INFO {stamp} {text}\n")
    sys.stderr.flush()


def write_log(event: str, **values: Any) -> None:
    """Append one event to the file of FAKE_REQUEST_LOG, whole, even beside other writers."""
    path = os.environ.get("FAKE_REQUEST_LOG")
    if path is None:
        return
    line = json.dumps({"event": event, "pid": os.getpid(), "time": time.time(), **values}) + "\n"
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_log(path: Path, event: str | None = None) -> list[dict[str, Any]]:
    """The events of a log so far, all or of one kind."""
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [one for one in found if event is None or one["event"] == event]
