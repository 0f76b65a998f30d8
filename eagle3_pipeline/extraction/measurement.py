"""Measures a target's layers for the first time, before any sample is judged by them.

Else nobody would judge the samples that settle the table, and those that are on their way meanwhile. They are
captured again in their shards, and judged there like all others.
"""

import asyncio
from collections.abc import Sequence

from eagle3_pipeline.extraction.capture import Captured, SampleRefusedError
from eagle3_pipeline.extraction.checks import reason_against
from eagle3_pipeline.extraction.inspection import Fetch
from eagle3_pipeline.extraction.layer_table import SAMPLES_FIRST, LayerTable
from eagle3_pipeline.extraction.plan import PlannedSample
from eagle3_pipeline.shards.format import ShardLayout

SAMPLES_MEASURED = SAMPLES_FIRST + 4
"""Some may be unusable."""


async def measure(
    samples: Sequence[PlannedSample], fetch: Fetch, layout: ShardLayout, table: LayerTable
) -> None:
    """Settle the table by states of `samples`; fewer than 32 settle none, and are not asked for.

    Unusable ones are left to the checks of their shards. Raises what `fetch` raises.
    """
    if len(samples) < SAMPLES_FIRST:
        return
    for sample in samples:  # one after the other: those of a large target are hundreds of MB each
        try:
            found = await fetch(sample)
        except SampleRefusedError:
            continue
        await asyncio.to_thread(_add, sample, found, layout, table)


def _add(sample: PlannedSample, found: Captured, layout: ShardLayout, table: LayerTable) -> None:
    shape = len(layout.layer_ids), layout.hidden_size
    if reason_against(sample.token_ids, found.token_ids, found.states, *shape) is None:
        table.add(found.states)
