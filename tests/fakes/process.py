"""Starting the stand-in from a test, as its own process, without the project's own serving code."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.recipes import FAKE_PYTHON

SERVED_NAME = "eagle3-recorded"
_START_LIMIT_S = 30


@dataclass(frozen=True)
class StandIn:
    """A running stand-in; `client` has its address as base."""

    process: "subprocess.Popen[bytes]"
    client: httpx.Client
    log: Path
    requests: Path
    control: Path


@contextmanager
def stand_in(folder: Path, model: Path, *flags: str, ready: bool = True, **faults: Any) -> Iterator[StandIn]:
    """Run the stand-in with vLLM's `flags`; `faults` are settings of tests/fakes/faults.py by their names."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log, requests, control = folder / "server.log", folder / "requests.jsonl", folder / "control.json"
    settings = {f"FAKE_{name.upper()}": str(value) for name, value in faults.items()}
    paths = {"FAKE_REQUEST_LOG": str(requests), "FAKE_CONTROL": str(control)}
    command = [str(FAKE_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **paths, **settings},
        )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False)
    try:
        if ready:
            _wait(process, client, log)
        yield StandIn(process, client, log, requests, control)
    finally:
        client.close()
        process.kill()
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", client: httpx.Client, log: Path) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the stand-in ended with {process.returncode}:\n{log.read_text()}")
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.02)
    raise AssertionError(f"the stand-in is not ready after {_START_LIMIT_S} s:\n{log.read_text()}")
