"""The whole life of a real server, once: start, work, a second user from another process, stop."""

import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.serving.server import RunningServer, open_server, running_servers, stop_servers
from eagle3_pipeline.serving.specification import generation_server
from tests.real.step import run_step
from tests.real.traces import Traces


@dataclass(frozen=True)
class Cycle:
    """Seconds of one life."""

    to_ready: float
    to_attached: float
    to_stopped: float


def live_once(recipe: Path, lineage: Lineage, logs: Path) -> Cycle:
    """Live through it with the generation server of a recipe; fails for anything left behind."""
    traces = Traces(logs)
    spec = generation_server(lineage)
    began = time.monotonic()
    with open_server(spec, logs) as server:
        to_ready = time.monotonic() - began
        ask(server)
        traces.see()
    attached = run_step(recipe, lineage, logs)
    assert attached["pid"] == server.pid
    began = time.monotonic()
    assert stop_servers(()) == [spec.served_name]
    to_stopped = time.monotonic() - began
    assert running_servers() == []
    traces.assert_gone()
    return Cycle(to_ready, attached["seconds"], to_stopped)


def ask(server: RunningServer) -> None:
    """Have it make a few tokens; raises httpx.HTTPError when it makes none."""
    # Not a handful of tokens: on CPUs with AMX, vLLM 0.32 dies of an illegal instruction at four of them.
    asked = {"model": server.model, "prompt": list(range(20, 60)), "max_tokens": 4}
    httpx.post(
        f"{server.base_url}/v1/completions", json=asked, timeout=60, trust_env=False
    ).raise_for_status()
