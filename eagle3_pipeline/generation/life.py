"""One life of the generation server: client, job and their news, until all is asked or the server dies."""

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from eagle3_pipeline.background import Background
from eagle3_pipeline.generation.begin_token import BeginToken
from eagle3_pipeline.generation.breaker import Breaker
from eagle3_pipeline.generation.captured_states import WANTS_STATES, CapturedStates, captured_states
from eagle3_pipeline.generation.concurrency import Reading, Regulator, make_slots
from eagle3_pipeline.generation.first_replies import FirstReplies
from eagle3_pipeline.generation.job import Job
from eagle3_pipeline.generation.progress import Pulse
from eagle3_pipeline.generation.shard_generation import ShardGeneration
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.serving.metrics import scrape

_logger = logging.getLogger(__name__)

PULSE_S = 5.0

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


@dataclass(frozen=True)
class Call:
    """What the lives of the servers of one call share."""

    lineage: Lineage
    pulse: Pulse
    first_replies: FirstReplies
    on_shard: OnShard
    beat: Callable[[], None]
    """Called every 5 s while a job runs, and at its end."""
    readings: list[Reading] = field(default_factory=list)


def ask_all(call: Call, works: list[ShardGeneration], running: Running) -> None:
    """Ask a running server for all missing replies of `works`; raises what Job.run raises.

    The callbacks are called in the caller's thread.
    """
    # Finished shards, and None at the end.
    news: queue.SimpleQueue[tuple[str, Manifest] | None] = queue.SimpleQueue()

    def on_shard(shard: str, manifest: Manifest) -> None:
        news.put((shard, manifest))

    with (
        captured_states(call.lineage) as states,
        Background(
            lambda: _ask(call, works, running, on_shard, states), on_end=lambda: news.put(None)
        ) as background,
    ):
        _announce(news, call)
        background.result()


async def _ask(
    call: Call,
    works: list[ShardGeneration],
    running: Running,
    on_shard: OnShard,
    states: CapturedStates | None,
) -> None:
    from eagle3_pipeline.generation.client import GenerationClient

    settings = call.lineage.recipe.generation
    slots = make_slots(settings)
    breaker = Breaker(running.check_alive)

    def trouble(reason: str) -> None:
        call.pulse.failed(reason)
        breaker.trouble(reason)

    job = Job(
        works,
        call.pulse,
        breaker,
        slots=slots,
        workers=settings.most_in_flight,
        server=running.spec.fingerprint,
        begin_token=BeginToken.of(call.lineage.model_path()),
        first_replies=call.first_replies,
        on_shard=on_shard,
        readings=call.readings,
        states=states,
    )
    regulator = Regulator(
        slots,
        lambda: scrape(running.base_url),
        call.pulse.measured,
        auto=settings.concurrency == "auto",
        most=settings.most_in_flight,
        readings=call.readings,
    )
    also = WANTS_STATES if states is not None else {}
    client = GenerationClient(running.base_url, running.model, settings, also=also, on_trouble=trouble)
    async with client, regulator:
        await job.run(client)


def _announce(news: "queue.SimpleQueue[tuple[str, Manifest] | None]", call: Call) -> None:
    """Pass on finished shards until the job ends, with a line of progress in between."""
    next_beat = time.monotonic() + PULSE_S
    while True:
        try:
            one = news.get(timeout=max(0.0, next_beat - time.monotonic()))
        except queue.Empty:
            call.beat()
            next_beat = time.monotonic() + PULSE_S
            continue
        if one is None:
            call.beat()
            return
        shard, manifest = one
        facts = manifest.facts
        _logger.info(
            f"{shard} is made: {facts['samples']} samples ({facts['good']} good, {facts['truncated']} "
            f"truncated), {facts['completion_tokens']} completion tokens"
        )
        call.on_shard(shard, manifest)
