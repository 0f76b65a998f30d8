"""Plain prefill: the requests of an extraction to a server that captures nothing, by the leanest of clients.

    python -m benchmarks.extraction.prefill IDS.json --base-url URL --model NAME --in-flight 32

IDS.json is a list of lists of token ids. Prints one JSON line: seconds and CPU from the first request to the
last reply, samples and tokens.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.serving.specification import generation_server

_STOP_LIMIT_S = 30.0
_NO_CACHE = "--no-enable-prefix-caching"


async def prefill(base_url: str, model: str, samples: list[list[int]], in_flight: int) -> dict[str, float]:
    """Seconds and CPU seconds for one prefill of each sample; raises httpx.HTTPError."""
    free = asyncio.Semaphore(in_flight)
    limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
    timeout = httpx.Timeout(600.0, pool=None)
    async with httpx.AsyncClient(
        base_url=base_url, limits=limits, timeout=timeout, trust_env=False
    ) as client:

        async def ask(ids: list[int]) -> None:
            body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0}
            async with free:
                (await client.post("/v1/completions", json=body)).raise_for_status()

        began, cpu_before = time.monotonic(), time.process_time()
        await asyncio.gather(*map(ask, samples))
        return {"seconds": time.monotonic() - began, "work_cpu_s": time.process_time() - cpu_before}


class PlainServer:
    """The extraction server of a recipe without speculative config and connector.

    It runs beside the extraction server on the same cores, of which one of the two is always idle. A lease
    would not allow that, so it is started here by hand, and ended here.
    """

    def __init__(self, lineage: Lineage, log: Path) -> None:
        servers = lineage.recipe.server
        plain = servers.extraction.model_copy(
            update={"extra_args": (*servers.extraction.extra_args, _NO_CACHE)}
        )
        recipe = lineage.recipe.model_copy(
            update={"server": servers.model_copy(update={"generation": plain})}
        )
        self._spec = generation_server(Lineage(recipe, lineage.storage_root))
        self._log = log
        self.pid = 0
        self.base_url = ""
        self.model = self._spec.served_name

    @contextmanager
    def run(self) -> Iterator["PlainServer"]:
        """The server, ready; raises RuntimeError with the end of its log."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [*self._spec.argv, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._spec.env},
                start_new_session=True,
            )
        self.pid, self.base_url = process.pid, f"http://127.0.0.1:{port}"
        try:
            self._wait_until_ready(process)
            yield self
        finally:
            _stop(process)

    def _wait_until_ready(self, process: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + self._spec.settings.start_timeout_s
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.base_url}/health", trust_env=False).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise RuntimeError(f"the plain server is not ready:\n{self._log.read_text()[-3000:]}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End the server with its engine, which is in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_STOP_LIMIT_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def main() -> None:
    """Ask as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", type=Path)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--in-flight", type=int, required=True)
    options = parser.parse_args()
    samples = json.loads(options.ids.read_text())
    found = asyncio.run(prefill(options.base_url, options.model, samples, options.in_flight))
    print(json.dumps({**found, "samples": len(samples), "tokens": sum(map(len, samples))}))


if __name__ == "__main__":
    main()
