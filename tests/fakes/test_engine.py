"""The stand-in's engine: what the requests that run do to each other, and what its metrics show of it."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from eagle3_pipeline.serving.metrics import ServerMetrics, parse_metrics
from tests.fakes.engine import Engine
from tests.fakes.process import StandIn, stand_in
from tests.fakes.record import chat
from tests.recipes import distinct_prompts


async def seconds_of(count: int, knee: int) -> float:
    """Until `count` requests of 50 ms each, begun together, are all done."""
    engine = Engine(lambda: knee)

    async def one() -> None:
        with engine.run(0.05, 10) as done:
            await done

    began = asyncio.get_running_loop().time()
    await asyncio.gather(*(one() for _ in range(count)))
    assert engine.tokens() == 10 * count
    assert engine.running == 0
    return asyncio.get_running_loop().time() - began


def test_beyond_the_knee_all_together_make_fewer_tokens() -> None:
    assert asyncio.run(seconds_of(8, knee=0)) < 0.05 * 8
    assert asyncio.run(seconds_of(8, knee=2)) >= 0.05 * 4**1.5 * 0.99


def test_a_request_that_is_left_early_keeps_the_tokens_it_made_and_slows_nobody() -> None:
    async def run() -> None:
        engine = Engine(lambda: 1)
        with engine.run(0.1, 100) as done:
            with engine.run(float("inf"), 100), engine.run(100.0, 1_000_000):
                await asyncio.sleep(0.02)
            left = engine.tokens()
            await done
        assert engine.tokens() >= 100
        assert 0 < left <= engine.tokens()
        assert engine.running == 0

    asyncio.run(asyncio.wait_for(run(), 5))


def metrics(server: StandIn) -> ServerMetrics:
    return parse_metrics(server.client.get("/metrics").text)


def wait_for_metrics(server: StandIn, **expected: int) -> ServerMetrics:
    deadline = time.monotonic() + 10
    while True:
        found = metrics(server)
        if all(getattr(found, name) == value for name, value in expected.items()):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def test_metrics_show_tokens_as_they_are_made_the_queue_the_cache_and_preemptions(
    tmp_path: Path, tiny_llama: Path
) -> None:
    faults = {"seconds_per_token": 0.05, "cache_requests": 4, "truncated_share": 1.0}
    with (
        stand_in(tmp_path, tiny_llama, "--max-num-seqs", "5", **faults) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        for text in distinct_prompts(8, seed=6):
            body = chat(text, max_completion_tokens=200)
            pool.submit(server.client.post, "/v1/chat/completions", json=body)
        found = wait_for_metrics(server, running=5, waiting=3)
        assert found.kv_cache_usage == 1.0
        assert found.preemptions == 1
        made = {found.generation_tokens}
        deadline = time.monotonic() + 10
        while len(made) < 5:
            assert time.monotonic() < deadline, made
            made.add(metrics(server).generation_tokens)
        assert max(made) < 5 * 200
        server.process.kill()


def test_a_client_that_goes_away_frees_its_place(tmp_path: Path, tiny_llama: Path) -> None:
    with stand_in(tmp_path, tiny_llama, "--max-num-seqs", "1", seconds_per_token=60, mean_tokens=9) as server:
        with pytest.raises(httpx.ReadTimeout):
            server.client.post("/v1/chat/completions", json=chat("Why?"), timeout=0.2)
        wait_for_metrics(server, running=0, waiting=0)
