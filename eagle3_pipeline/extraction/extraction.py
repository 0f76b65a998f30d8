"""The step `hidden_state_shards`: hidden states of the target for all samples that train.

    synthetic_samples/<shard>  ->  extraction server  ->  hidden_state_shards/<shard>

The server is opened once for all missing shards. Nothing heavy is imported until there is work.
"""

import logging
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_pipeline.background import Background
from eagle3_pipeline.durable_files import full_disk_named, require_free_bytes
from eagle3_pipeline.extraction.layers import check_layers
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.shards.format import ShardLayout
from eagle3_pipeline.shards.listing import JOURNAL_NAME
from eagle3_pipeline.staging import staging_folder

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

_logger = logging.getLogger(__name__)


def extract_shards(
    lineage: Lineage,
    shards: Sequence[str],
    server: "AbstractContextManager[RunningServer]",
    on_shard: Callable[[str, Manifest], None],
) -> list[Manifest]:
    """Make the hidden states of `shards`; those that are made already are left as they are.

    `server` leaves its files in `lineage.staging`; it is entered once, and only if states are missing.
    `on_shard` is called once for each shard, made before or now: first for those that are there,
    then as the others become complete. Raises MissingInput without samples and their audit,
    RecipeError for layers that the target does not have, QualityError when over 1 % of a shard is
    quarantined, NotEnoughRoom when a disk is full, and what the server raises. Finished shards, and
    finished parts of an unfinished one, stand.
    """
    target = lineage.target_model().require().facts
    check_layers(lineage.recipe.extraction.layers, int(target["num_layers"]))
    lineage.sample_audit().require()
    made: dict[str, Manifest] = {}
    for shard in shards:
        manifest = lineage.hidden_state_shards(shard).manifest()
        if manifest is not None:
            # A kill just after the manifest leaves the journal, which must not vouch for parts later on.
            (lineage.hidden_state_shards(shard).folder / JOURNAL_NAME).unlink(missing_ok=True)
            made[shard] = manifest
            on_shard(shard, manifest)
    missing = [shard for shard in shards if shard not in made]

    def finished(manifest: Manifest) -> None:
        shard = str(manifest.shard)
        made[shard] = manifest
        _logger.info(
            f"hidden states of {shard} are made: {manifest.facts['samples']:,} samples, "
            f"{manifest.facts['tokens']:,} tokens, {manifest.bytes / 2**20:,.0f} MiB"
        )
        on_shard(shard, manifest)

    if missing:
        _extract(lineage, missing, server, finished)
    return [made[shard] for shard in shards]


def longest_sample(lineage: Lineage) -> int:
    """Tokens to which samples are cut: max_sample_tokens, and one less than the server's longest sequence.

    The request generates one token, which must have its place in the server's sequence.
    """
    recipe = lineage.recipe
    longest = recipe.server.extraction.max_model_len or lineage.target_model().require().facts["max_context"]
    return min(recipe.extraction.max_sample_tokens, int(longest) - 1)


def _extract(
    lineage: Lineage,
    missing: list[str],
    server: "AbstractContextManager[RunningServer]",
    finished: Callable[[Manifest], None],
) -> None:
    layout = _layout(lineage)
    settings = lineage.recipe.extraction
    window = 2 * settings.concurrency
    staged = window * longest_sample(lineage) * layout.bytes_per_token
    part = int(settings.part_gib * 2**30)
    require_free_bytes(lineage.folder, staged + part, "the staging of hidden states and one part of a shard")
    way_out = (
        "Finished shards and parts stand. Free some space or point EAGLE3_STORAGE to a larger disk, then "
        "materialise hidden_state_shards again."
    )
    with (
        full_disk_named(lineage.folder, way_out),
        staging_folder(lineage.staging) as staging,
        server as running,
    ):
        _stream(lineage, missing, layout, staging, running, finished)


def _layout(lineage: Lineage) -> ShardLayout:
    target = lineage.target_model().require().facts
    return ShardLayout(
        lineage.recipe.extraction.layers, int(target["hidden_size"]), str(target["model_fingerprint"])
    )


def _stream(
    lineage: Lineage,
    missing: list[str],
    layout: ShardLayout,
    staging: Path,
    server: "RunningServer",
    finished: Callable[[Manifest], None],
) -> None:
    from eagle3_pipeline.extraction.capture import Capture
    from eagle3_pipeline.extraction.plan import plan_shard
    from eagle3_pipeline.extraction.progress import Progress
    from eagle3_pipeline.extraction.shard_extraction import ShardExtraction
    from eagle3_pipeline.extraction.stream import stream
    from eagle3_pipeline.samples.shard_file import SAMPLES_NAME, read_samples

    recipe = lineage.recipe
    longest = longest_sample(lineage)
    sources = {shard: lineage.synthetic_samples(shard) for shard in missing}

    def works() -> Iterator[ShardExtraction]:
        for shard, source in sources.items():
            plan = plan_shard(
                read_samples(source.folder / SAMPLES_NAME),
                train_truncated=recipe.generation.train_truncated,
                longest=longest,
            )
            place = lineage.hidden_state_shards(shard)
            yield ShardExtraction(place, plan, layout, int(recipe.extraction.part_gib * 2**30))

    async def run() -> None:
        progress = Progress(sum(int(source.require().facts["samples"]) for source in sources.values()))
        in_flight = recipe.extraction.concurrency
        async with Capture(server.base_url, server.model, staging, in_flight, server.check_alive) as capture:
            await stream(works(), capture, layout, 2 * in_flight, progress, news.put)

    # Finished shards, and None at the end: they are announced in the caller's thread.
    news: queue.SimpleQueue[Manifest | None] = queue.SimpleQueue()
    with Background(run, on_end=lambda: news.put(None)) as background:
        while (manifest := news.get()) is not None:
            finished(manifest)
        background.result()
