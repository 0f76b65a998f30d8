"""The web UI alone, without the daemon, on a free port of the loopback address."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

CHECKOUT = Path(__file__).resolve().parents[1]
_START_S = 120.0


@contextmanager
def web_ui(log: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """The address of the UI while it runs.

    `environment` says of what: DAGSTER_HOME, EAGLE3_STORAGE, EAGLE3_RECIPES. The rest is as in this process.
    Raises RuntimeError with its log where it does not come up within two minutes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-W", "ignore", "-m", "dagster_webserver"]
    argv += ["-w", str(CHECKOUT / "workspace.yaml"), "-h", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as file:
        server = subprocess.Popen(
            argv, cwd=CHECKOUT, env={**os.environ, **environment}, stdout=file, stderr=file
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(server, address, log)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=60)


def _wait(server: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            httpx.get(f"{address}/server_info", trust_env=False).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"the web UI is not there after {_START_S:.0f} s, or ended:\n{log.read_text()}")
