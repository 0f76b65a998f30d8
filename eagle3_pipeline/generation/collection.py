"""The step `synthetic_samples`: the target's own answers to the prompts, shard by shard.

    prompts  ->  generation server  ->  synthetic_samples/<shard>/samples.parquet

A call makes the shards that are missing and goes on from what a killed call left. The server is
opened once for all of them, and not at all when every reply is recorded already.
"""

import logging
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from eagle3_pipeline.background import Background
from eagle3_pipeline.durable_files import full_disk_named
from eagle3_pipeline.errors import RecipeError
from eagle3_pipeline.generation.begin_token import BeginToken
from eagle3_pipeline.generation.breaker import Breaker
from eagle3_pipeline.generation.job import Job
from eagle3_pipeline.generation.progress import Pulse
from eagle3_pipeline.generation.shard_generation import ShardGeneration, remove_journal
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.prompts.selection import read_prompts

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


def collect_samples(
    lineage: Lineage,
    shards: Sequence[str],
    server: AbstractContextManager[Running],
    on_shard: OnShard,
) -> list[Manifest]:
    """Make the samples of `shards`; those that are made already are left as they are.

    `server` is entered once, and only if a reply is missing. `on_shard` is called in the caller's
    thread, once for each shard, made before or now: first for those that are there, then as each of
    the others gets its last reply. Raises MissingInput without prompts or target, Busy when another
    process works on one of the shards, DamagedFile, QualityError when the first replies show a wrong
    set-up, BadInput for a doubled begin token, and ServerError. What was answered until then is kept,
    and the next call asks for the rest.
    """
    made: dict[str, Manifest] = {}

    def finished(shard: str, manifest: Manifest) -> None:
        made[shard] = manifest
        on_shard(shard, manifest)

    def is_missing(shard: str) -> bool:
        return shard in lineage.recipe.prompts.shards and lineage.synthetic_samples(shard).manifest() is None

    with ExitStack() as stack:
        works = []
        # Those that are made come first, so that they are announced when another one is busy.
        for shard in sorted(shards, key=is_missing):
            work = open_shard(lineage, shard)
            if isinstance(work, Manifest):
                finished(shard, work)
            else:
                works.append(stack.enter_context(work))
        for work in [work for work in works if work.is_complete]:
            finished(work.name, work.finish())  # a kill came between its last reply and its manifest
        works = [work for work in works if work.name not in made]
        if works:
            missing = sum(one.turns_left for work in works for one in work.conversations)
            _logger.info(
                f"{missing} replies in {len(works)} shards are missing; opening the generation server"
            )
            way_out = (
                "Recorded replies stand. Free some space or point EAGLE3_STORAGE to a larger disk, then "
                "materialise synthetic_samples again."
            )
            with full_disk_named(lineage.folder, way_out), server as running:
                ask_all(lineage, works, running, finished)
    return [made[shard] for shard in shards]


def open_shard(lineage: Lineage, shard: str) -> Manifest | ShardGeneration:
    """The manifest of a shard that is made, or the shard taken for this process; raises Busy."""
    plan = lineage.recipe.prompts
    if shard not in plan.shards:
        raise RecipeError(f"no shard {shard} in this recipe, which has {plan.shards[0]} to {plan.shards[-1]}")
    place = lineage.synthetic_samples(shard)
    if (manifest := place.manifest()) is not None:
        remove_journal(place)
        return manifest
    work = ShardGeneration(place, read_prompts(lineage.prompts(), plan.shards.index(shard), plan.per_shard))
    if (manifest := place.manifest()) is not None:  # made by another process while we waited for its lock
        work.close()
        remove_journal(place)
        return manifest
    return work


def ask_all(lineage: Lineage, works: list[ShardGeneration], running: Running, on_shard: OnShard) -> None:
    """Ask a running server for all missing replies of `works`, and say every 5 s how it goes."""
    from eagle3_pipeline.generation.client import GenerationClient

    recipe = lineage.recipe
    left = sum(one.turns_left for work in works for one in work.conversations)
    before = sum(work.recorded for work in works)
    pulse, breaker = Pulse(before + left, before), Breaker(running.check_alive)
    # Finished shards, and None at the end: they are announced in the caller's thread.
    news: queue.SimpleQueue[tuple[str, Manifest] | None] = queue.SimpleQueue()

    def trouble(reason: str) -> None:
        pulse.failed(reason)
        breaker.trouble(reason)

    async def work() -> None:
        job = Job(
            works,
            pulse,
            breaker,
            in_flight=recipe.generation.in_flight,
            server=running.spec.fingerprint,
            begin_token=BeginToken.of(lineage.model_path()),
            reasoning_parser=recipe.server.generation.reasoning_parser,
            on_shard=lambda shard, manifest: news.put((shard, manifest)),
        )
        settings = recipe.generation
        async with GenerationClient(running.base_url, running.model, settings, on_trouble=trouble) as client:
            await job.run(client)

    with Background(work, on_end=lambda: news.put(None)) as background:
        _announce(news, pulse, on_shard)
        background.result()
    _logger.info(f"samples are collected: {pulse.line()}")


def _announce(
    news: "queue.SimpleQueue[tuple[str, Manifest] | None]", pulse: Pulse, on_shard: OnShard
) -> None:
    """Pass on finished shards until the job ends, with a line of progress in between."""
    next_line = time.monotonic() + _PULSE_S
    while True:
        try:
            one = news.get(timeout=max(0.0, next_line - time.monotonic()))
        except queue.Empty:
            _logger.info(pulse.line())
            next_line = time.monotonic() + _PULSE_S
            continue
        if one is None:
            return
        shard, manifest = one
        facts = manifest.facts
        _logger.info(
            f"{shard} is made: {facts['samples']} samples ({facts['good']} good, {facts['truncated']} "
            f"truncated), {facts['completion_tokens']} completion tokens"
        )
        on_shard(shard, manifest)
