"""One life of the generation server: client, job and their news, until all is asked or the server dies."""

import logging
import queue
import time
from collections.abc import Callable
from typing import Protocol

from eagle3_pipeline.background import Background
from eagle3_pipeline.generation.begin_token import BeginToken
from eagle3_pipeline.generation.breaker import Breaker
from eagle3_pipeline.generation.concurrency import Regulator, make_slots
from eagle3_pipeline.generation.job import Job
from eagle3_pipeline.generation.progress import Pulse
from eagle3_pipeline.generation.shard_generation import ShardGeneration
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.serving.metrics import scrape

_logger = logging.getLogger(__name__)

_PULSE_S = 5.0

OnShard = Callable[[str, Manifest], None]


class Specification(Protocol):
    """What is asked of a server's specification."""

    @property
    def fingerprint(self) -> str: ...


class Running(Protocol):
    """What is asked of a running server."""

    @property
    def base_url(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def spec(self) -> Specification: ...

    def check_alive(self) -> object: ...


def ask_all(
    lineage: Lineage,
    works: list[ShardGeneration],
    running: Running,
    pulse: Pulse,
    on_shard: OnShard,
    beat: Callable[[], None],
) -> None:
    """Ask a running server for all missing replies of `works`; `beat` is called every 5 s and at the end.

    Both callbacks are called in the caller's thread. Raises what Job.run raises.
    """
    from eagle3_pipeline.generation.client import GenerationClient

    recipe = lineage.recipe
    settings = recipe.generation
    breaker = Breaker(running.check_alive)
    # Finished shards, and None at the end: they are announced in the caller's thread.
    news: queue.SimpleQueue[tuple[str, Manifest] | None] = queue.SimpleQueue()

    def trouble(reason: str) -> None:
        pulse.failed(reason)
        breaker.trouble(reason)

    async def work() -> None:
        slots = make_slots(settings)
        regulator = Regulator(
            slots,
            lambda: scrape(running.base_url),
            pulse.measured,
            auto=settings.concurrency == "auto",
            most=settings.most_in_flight,
        )
        job = Job(
            works,
            pulse,
            breaker,
            slots=slots,
            workers=settings.most_in_flight,
            server=running.spec.fingerprint,
            begin_token=BeginToken.of(lineage.model_path()),
            reasoning_parser=recipe.server.generation.reasoning_parser,
            on_shard=lambda shard, manifest: news.put((shard, manifest)),
            readings=regulator.readings,
        )
        client = GenerationClient(running.base_url, running.model, settings, on_trouble=trouble)
        async with client, regulator:
            await job.run(client)

    with Background(work, on_end=lambda: news.put(None)) as background:
        _announce(news, beat, on_shard)
        background.result()


def _announce(
    news: "queue.SimpleQueue[tuple[str, Manifest] | None]", beat: Callable[[], None], on_shard: OnShard
) -> None:
    """Pass on finished shards until the job ends, with a line of progress in between."""
    next_beat = time.monotonic() + _PULSE_S
    while True:
        try:
            one = news.get(timeout=max(0.0, next_beat - time.monotonic()))
        except queue.Empty:
            beat()
            next_beat = time.monotonic() + _PULSE_S
            continue
        if one is None:
            beat()
            return
        shard, manifest = one
        facts = manifest.facts
        _logger.info(
            f"{shard} is made: {facts['samples']} samples ({facts['good']} good, {facts['truncated']} "
            f"truncated), {facts['completion_tokens']} completion tokens"
        )
        on_shard(shard, manifest)
