"""The step `synthetic_samples`: the target's own answers to the prompts, shard by shard.

    prompts  ->  generation server  ->  synthetic_samples/<shard>/samples.parquet

A call makes the shards that are missing and goes on from what a killed call left. The server is
opened once for all of them, again when it dies, and not at all when every reply is recorded already.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

from eagle3_pipeline.background import repeated
from eagle3_pipeline.durable_files import full_disk_named
from eagle3_pipeline.errors import RecipeError, ServerDied, ServerStalled
from eagle3_pipeline.generation.concurrency import make_slots
from eagle3_pipeline.generation.first_replies import FirstReplies
from eagle3_pipeline.generation.life import PULSE_S, Call, OnShard, Running, ask_all
from eagle3_pipeline.generation.progress import Pulse
from eagle3_pipeline.generation.shard_generation import ShardGeneration, remove_journal
from eagle3_pipeline.generation.vitals import Vitals
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.progress_file import ProgressFile
from eagle3_pipeline.prompts.selection import read_prompts

_logger = logging.getLogger(__name__)

OpenServer = Callable[[], AbstractContextManager[Running]]
OnPulse = Callable[[Vitals], None]


def collect_samples(
    lineage: Lineage,
    shards: Sequence[str],
    server: OpenServer,
    on_shard: OnShard,
    on_pulse: OnPulse = lambda vitals: None,
) -> list[Manifest]:
    """Make the samples of `shards`; those that are made already are left as they are.

    `server` is called and entered only if a reply is missing, and again when a server died, at most
    `generation.server_restarts` times, but not after two lives in a row that added no reply. `on_shard` is
    called in the caller's thread, once for each shard, made before or now: first for those that are there,
    then as each of the others gets its last reply; `on_pulse`, there too, every few seconds. Raises
    MissingInput without prompts or target, Busy when another process works on one of the shards, DamagedFile,
    QualityError when the first replies show a wrong set-up, BadInput for a doubled begin token, and
    ServerError. What was answered until then is kept, and the next call asks for the rest.
    """
    made: dict[str, Manifest] = {}

    def finished(shard: str, manifest: Manifest) -> None:
        made[shard] = manifest
        on_shard(shard, manifest)

    def is_missing(shard: str) -> bool:
        return shard in lineage.recipe.prompts.shards and lineage.synthetic_samples(shard).manifest() is None

    way_out = (
        "Recorded replies stand. Free some space or point EAGLE3_STORAGE to a larger disk, then materialise "
        "synthetic_samples again."
    )
    with full_disk_named(lineage.folder, way_out), ExitStack() as stack:
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
            # Counted with what is left, so that the attempts of one run go on counting.
            standing = sum(int(manifest.facts["samples"]) for manifest in made.values())
            _ask_through_deaths(lineage, works, standing, server, finished, on_pulse)
    return [made[shard] for shard in shards]


def _ask_through_deaths(
    lineage: Lineage,
    works: list[ShardGeneration],
    standing: int,
    server: OpenServer,
    on_shard: OnShard,
    on_pulse: OnPulse,
) -> None:
    """Ask for all missing replies, with another server when one dies after it added some.

    `standing` is the number of samples of the other shards, which are made.
    """
    settings = lineage.recipe.generation
    left = sum(work.turns_left for work in works)
    before = standing + sum(work.recorded for work in works)
    pulse = Pulse(before + left, before, longest=settings.max_completion_tokens)
    parser = lineage.recipe.server.generation.reasoning_parser

    def beat() -> None:
        vitals = pulse.vitals()
        _logger.info(vitals.line())
        on_pulse(vitals)

    call = Call(lineage, pulse, FirstReplies(parser, int(make_slots(settings).total_tokens)), on_shard, beat)
    _logger.info(f"{left} replies in {len(works)} shards are missing; opening the generation server")
    with (
        ProgressFile(lineage.progress, "synthetic_samples") as progress,
        # From a thread, because a server may load for half an hour.
        repeated(PULSE_S, lambda: progress.write(pulse.vitals().to_json())),
    ):
        _live_on(call, works, server, settings.server_restarts)


def _live_on(call: Call, works: list[ShardGeneration], server: OpenServer, restarts: int) -> None:
    """One life of a server after the other. Two in a row that add no reply are one too many.

    One such may be the prompt's fault that killed it: the next life asks those last that were out.
    """
    barren = 0
    while True:
        done = call.pulse.done
        call.pulse.server_starts()
        try:
            with server() as running:
                ask_all(call, works, running)
            return
        except (ServerDied, ServerStalled) as death:
            barren = barren + 1 if call.pulse.done == done else 0
            if restarts == 0 or barren == 2:
                raise
            restarts -= 1
            _logger.warning(
                f"{death}\n{call.pulse.done} of {call.pulse.total} replies are in; the rest is asked for "
                f"again, of a new server where this one is gone (generation.server_restarts: {restarts} more)"
            )
            works = [work for work in works if not work.is_finished]


def open_shard(lineage: Lineage, shard: str) -> Manifest | ShardGeneration:
    """The manifest of a shard that is made, or the shard taken for this process; raises Busy."""
    plan = lineage.recipe.prompts
    if shard not in plan.shards:
        raise RecipeError(f"no shard {shard} in this recipe, which has {plan.shards[0]} to {plan.shards[-1]}")
    place = lineage.synthetic_samples(shard)
    if (manifest := place.manifest()) is not None:
        remove_journal(place)
        return manifest
    prompts = lineage.prompts()
    work = ShardGeneration(
        place,
        read_prompts(prompts, plan.shards.index(shard), plan.per_shard),
        prompts.require().facts["validation"],
    )
    if (manifest := place.manifest()) is not None:  # made by another process while we waited for its lock
        work.close()
        remove_journal(place)
        return manifest
    return work
