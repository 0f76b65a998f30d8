"""One run of the extraction over the shards that are missing: server, proof, stream."""

import asyncio
import logging
import queue
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from eagle3_pipeline.background import Background
from eagle3_pipeline.durable_files import write_json
from eagle3_pipeline.extraction.alone import Alone
from eagle3_pipeline.extraction.capture import Capture
from eagle3_pipeline.extraction.captured import discard_all, from_files, shards_of_files
from eagle3_pipeline.extraction.head import Head
from eagle3_pipeline.extraction.inspection import Fetch, Inspector, from_server
from eagle3_pipeline.extraction.layer_table import LayerTable
from eagle3_pipeline.extraction.measurement import SAMPLES_MEASURED, measure
from eagle3_pipeline.extraction.plan import PlannedSample, ShardPlan, planned_shard
from eagle3_pipeline.extraction.progress import Progress
from eagle3_pipeline.extraction.proof import SAMPLES, chosen, prove
from eagle3_pipeline.extraction.quarantine import Quarantine
from eagle3_pipeline.extraction.shard_extraction import ShardExtraction
from eagle3_pipeline.extraction.shard_meaning import ShardMeaning
from eagle3_pipeline.extraction.space import SpaceWatch
from eagle3_pipeline.extraction.stream import Bounds, stream
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.manifest import Manifest
from eagle3_pipeline.progress_file import ProgressFile
from eagle3_pipeline.provenance import fingerprint
from eagle3_pipeline.samples.folder_bytes import bytes_below
from eagle3_pipeline.shards.format import ShardLayout
from eagle3_pipeline.staging import staging_folder

if TYPE_CHECKING:
    from eagle3_pipeline.serving.server import RunningServer

_logger = logging.getLogger(__name__)

# Samples on their way for each at the server: others wait for an earlier one, or for their checks.
_SAMPLES_PER_SLOT = 4
# Of what may be on its way, for samples that were captured alone and wait to be compared.
_SHARE_ALONE = 0.25
_SHARDS_AHEAD = 8  # whose token ids are in memory to find such samples


class ExtractionRun:
    """What the shards of one call share."""

    def __init__(self, lineage: Lineage, missing: list[str], layout: ShardLayout, file: ProgressFile) -> None:
        self._lineage = lineage
        self._settings = lineage.recipe.extraction
        self._missing = missing
        self._layout = layout
        self._file = file
        self._head = Head.read(lineage.model_path())
        self._table_path = _table_path(lineage)
        self._table = LayerTable.read(self._table_path) or LayerTable(layout.layer_ids)
        storage = lineage.recipe.storage
        budget = int(storage.max_gib * 2**30) - bytes_below(lineage.folder) if storage.max_gib else None
        self._quarantine = Quarantine(self._settings.max_quarantined_share)
        self._plans: dict[str, ShardPlan] = {}
        self._reached = 0
        """Shards whose work has begun."""
        self._space = SpaceWatch(lineage.folder, int(storage.keep_free_gib * 2**30), budget)

    def make(
        self,
        server: "AbstractContextManager[RunningServer]",
        finished: Callable[[Manifest], None],
    ) -> None:
        """Make the missing shards; each is told in the caller's thread when its manifest stands."""
        files, needs_server = self._files()
        with ExitStack() as stack:
            if not self._lineage.recipe.partitions.extraction:
                # Threads that wait for each other cost more than the work, beside a server on the same cores.
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(1)
            connection = None
            if needs_server:
                staging = stack.enter_context(staging_folder(self._lineage.staging))
                connection = stack.enter_context(server), staging
            # Finished shards, and None at the end.
            news: queue.SimpleQueue[Manifest | None] = queue.SimpleQueue()
            background = Background(
                lambda: self._work(files, connection, news.put), on_end=lambda: news.put(None)
            )
            stack.enter_context(background)
            while (manifest := news.get()) is not None:
                self._keep_table()
                _logger.info(
                    f"hidden states of {manifest.shard} are made: {manifest.facts['samples']:,} samples, "
                    f"{manifest.facts['tokens']:,} tokens, {manifest.bytes / 2**20:,.0f} MiB"
                )
                finished(manifest)
            background.result()

    def _files(self) -> tuple[dict[str, str], bool]:
        """The shard of each sample whose states came with its reply, and whether there are others."""
        if not self._settings.while_generating:
            return {}, True
        files: dict[str, str] = {}
        needs_server = False
        for shard in self._missing:  # one after the other: the token ids of all shards may be gigabytes
            planned = planned_shard(self._lineage, shard).samples
            found = shards_of_files(self._lineage, {shard: planned})
            needs_server |= len(found) < len(planned)
            files |= found
        return files, needs_server

    def _keep_table(self) -> None:
        """Keep what this target's layers look like, once: later servers are compared with it."""
        if self._table.is_settled and not self._table_path.exists():
            self._table.write(self._table_path)

    async def _work(
        self,
        files: dict[str, str],
        connection: "tuple[RunningServer, Path] | None",
        on_finished: Callable[[Manifest], None],
    ) -> None:
        slots = self._settings.concurrency
        bounds = Bounds(
            int(self._settings.staging_gib * 2**30 * (1 - _SHARE_ALONE)),
            _SAMPLES_PER_SLOT * slots,
            self._layout.as_captured.bytes_per_token,
        )
        total = sum(
            int(self._lineage.synthetic_samples(shard).require().facts["samples"]) for shard in self._missing
        )
        async with AsyncExitStack() as stack:
            fetch: Fetch | None = None
            if connection is not None:
                server, staging = connection
                capture = Capture(server.base_url, server.model, staging, slots, server.check_alive)
                fetch = from_server(await stack.enter_async_context(capture))
                await self._prove(fetch, server.log)
            everywhere = from_files(self._lineage, files, fetch) if files or fetch is None else fetch
            if not self._table.is_settled:
                await measure(await self._some(SAMPLES_MEASURED), everywhere, self._layout, self._table)
            alone = None if fetch is None else self._alone(fetch, bounds)
            if alone is not None:
                stack.push_async_callback(alone.close)
            inspector = Inspector(everywhere, self._layout, self._table, alone=alone)
            await stream(self._works(), inspector, bounds, Progress(total, self._file), on_finished)

    async def _prove(self, fetch: Fetch, log: Path) -> None:
        """Prove a server once after its start: its log, which is its own alone, says so to later steps."""
        proven = log.with_name(f"{log.name}.proven")
        if not proven.exists() and (samples := await self._some(SAMPLES)):
            meaning = self._meaning(samples)
            await prove(samples, fetch, self._layout, meaning, self._table)
            if len(samples) == SAMPLES:
                write_json(proven, meaning.facts())

    async def _some(self, wanted: int) -> list[PlannedSample]:
        """Up to so many samples, from the first shard that is missing as far as it has them."""
        samples: list[PlannedSample] = []
        for shard in self._missing:  # the first may have few, or none
            plan = await asyncio.to_thread(planned_shard, self._lineage, shard)
            samples += chosen(plan.samples, wanted - len(samples))
            if len(samples) == wanted:
                break
        return samples

    def _alone(self, fetch: Fetch, bounds: Bounds) -> Alone:
        most_bytes = int(self._settings.staging_gib * 2**30 * _SHARE_ALONE)
        return Alone(fetch, self._plans_ahead, most_bytes, bounds.bytes_per_token)

    def _plans_ahead(self) -> Iterator[ShardPlan]:
        """The plans after the shard that is worked on; what is read here is not read again."""
        for shard in self._missing[self._reached : self._reached + _SHARDS_AHEAD]:
            if shard not in self._plans:
                self._plans[shard] = planned_shard(self._lineage, shard)
            yield self._plans[shard]

    def _works(self) -> Iterator[ShardExtraction]:
        for shard in self._missing:
            plan = self._plans.pop(shard, None) or planned_shard(self._lineage, shard)
            self._reached += 1
            yield ShardExtraction(
                self._lineage.hidden_state_shards(shard),
                plan,
                self._layout,
                int(self._settings.part_gib * 2**30),
                meaning=self._meaning(plan.samples),
                table=self._table,
                space=self._space,
                quarantine=self._quarantine,
                on_finished=partial(discard_all, self._lineage, shard),
            )

    def _meaning(self, samples: list[PlannedSample]) -> ShardMeaning:
        recipe = self._lineage.recipe
        return ShardMeaning(self._head, samples, recipe.generation, recipe.prompts.seed)


def _table_path(lineage: Lineage) -> Path:
    """One table for each target and whatever of the server changes its states."""
    inputs = {
        "target": lineage.target_model().require().facts["model_fingerprint"],
        "layers": list(lineage.recipe.extraction.layers),
        "server": lineage.recipe.server.extraction.result_settings(),
    }
    return lineage.folder / "layer_table" / f"{fingerprint(inputs)[:12]}.json"
