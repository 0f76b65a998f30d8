"""The client's limits on a real socket: what a transport in memory cannot show."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.generation.client import GenerationClient
from eagle3_pipeline.generation.collection import collect_samples
from eagle3_pipeline.generation.reply import Reply, Unanswered
from eagle3_pipeline.recipe.generation import Generation
from tests.generation.chat_server import ChatServer, chat_body, serve_chat
from tests.generation.world import make_lineage


@pytest.fixture
def server() -> Iterator[ChatServer]:
    """A server on a real socket."""
    with serve_chat() as running:
        yield running


def ask(url: str, limit_s: float, troubles: list[str] | None = None) -> Reply:
    """One request without pauses between its attempts."""
    heard = [] if troubles is None else troubles

    async def pause(seconds: float) -> None:
        pass

    async def run() -> Reply:
        settings = Generation(max_completion_tokens=64, request_timeout_s=limit_s)
        async with GenerationClient(
            url, "eagle3-test", settings, on_trouble=heard.append, sleep=pause
        ) as client:
            return await client.ask([{"role": "user", "content": "p0.0"}])

    return asyncio.run(run())


def test_a_refused_connection_is_tried_again_and_told_as_one() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    troubles: list[str] = []
    with pytest.raises(Unanswered, match="connection ConnectError"):
        ask(url, 5, troubles)
    assert troubles == ["connection ConnectError"] * 6


def test_a_server_that_accepts_and_never_answers_costs_one_limit() -> None:
    troubles: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        before = time.monotonic()
        with pytest.raises(Unanswered, match=r"no reply within 0.2 s \(generation.request_timeout_s\)"):
            ask(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.2, troubles)
    assert troubles == ["timeout"]
    assert time.monotonic() - before < 5


def test_a_body_that_dribbles_past_the_limit_of_the_whole_request_is_given_up(server: ChatServer) -> None:
    def dribble(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> bool:
        handler.send_response(200)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        for _ in range(1000):  # no silence is as long as the limit; the client hangs up
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.02)
        return True

    server.behave = dribble
    troubles: list[str] = []
    with pytest.raises(Unanswered, match=r"no reply within 0.3 s"):
        ask(server.base_url, 0.3, troubles)
    assert (troubles, len(server.asked)) == (["timeout"], 1)


def test_a_body_cut_in_the_middle_is_tried_again(server: ChatServer) -> None:
    def cut(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> bool:
        if len(server.asked) > 1:
            return False
        data = json.dumps(chat_body()).encode()
        handler.send_response(200)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: len(data) // 2])
        handler.close_connection = True
        return True

    server.behave = cut
    troubles: list[str] = []
    assert ask(server.base_url, 5, troubles).content == "fine"
    assert troubles == ["connection RemoteProtocolError"]


def test_the_clock_of_a_request_does_not_run_while_it_waits_for_its_slot(
    server: ChatServer, tmp_path: Path
) -> None:
    def slow(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> bool:
        time.sleep(0.1)
        return False

    server.behave = slow
    limits = {"concurrency": 1, "max_completion_tokens": 64, "request_timeout_s": 0.7}
    lineage = make_lineage(tmp_path, [1] * 12, 12, generation=limits)
    before = time.monotonic()
    (manifest,) = collect_samples(lineage, lineage.recipe.shards, server.open, lambda shard, made: None)
    assert time.monotonic() - before > 1.2  # the last one waited for longer than its limit
    assert (manifest.facts["good"], len(server.asked)) == (12, 12)
