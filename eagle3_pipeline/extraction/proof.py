"""Proves a server on a few samples before any shard is made of its states.

They are captured together and then each alone. Ids, rows and values must be right, both captures the same but
for rounding, the last layer must mean what was recorded, and the layers must be as they were when this target
was measured first. So a wrong build or set-up costs seconds and not a night.
"""

import asyncio
import logging
from collections.abc import Sequence

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.extraction.capture import Captured, SampleRefusedError
from eagle3_pipeline.extraction.checks import reason_against
from eagle3_pipeline.extraction.inspection import Fetch, require_same
from eagle3_pipeline.extraction.layer_table import LayerTable
from eagle3_pipeline.extraction.plan import PlannedSample
from eagle3_pipeline.extraction.shard_meaning import ShardMeaning
from eagle3_pipeline.shards.format import ShardLayout

_logger = logging.getLogger(__name__)

SAMPLES = 8


def chosen(samples: Sequence[PlannedSample], wanted: int = SAMPLES) -> list[PlannedSample]:
    """Up to `wanted` samples, evenly spread over the shard's order."""
    every = max(1, len(samples) // wanted)
    return list(samples[::every][:wanted])


async def prove(
    samples: Sequence[PlannedSample],
    fetch: Fetch,
    layout: ShardLayout,
    meaning: ShardMeaning,
    known: LayerTable,
) -> None:
    """Raise QualityError unless the server captures right states of `samples`; `known` may still be empty.

    One sample may be unusable, as in a shard; the others must be right.
    """
    complaint = await _complaint(samples, fetch, layout, meaning, known)
    if complaint is not None:
        raise QualityError(
            f"the extraction server was tried on {len(samples)} samples before any shard is made, and "
            f"{complaint}. No state was kept. Look at its log, at server.extraction and at the version of "
            "vLLM (eagle3 doctor)."
        )
    _logger.info(
        f"the server is proven: {len(samples)} samples captured together and alone, {meaning.facts()}"
    )


async def _complaint(
    samples: Sequence[PlannedSample],
    fetch: Fetch,
    layout: ShardLayout,
    meaning: ShardMeaning,
    known: LayerTable,
) -> str | None:
    table = LayerTable(layout.layer_ids)
    unusable: dict[str, str] = {}
    together = await _together(samples, fetch)
    for sample in samples:
        # One after the other, and then no longer held: those of a large target are hundreds of MB each.
        batched = together.pop(0)
        single = await _try(fetch, sample, alone=True)
        reason = await asyncio.to_thread(_looked_at, sample, batched, single, layout, meaning, table)
        if reason is not None:
            unusable[sample.sample_id] = reason
    if len(unusable) > 1 or len(unusable) == len(samples):
        return f"{len(unusable)} of them are unusable: {unusable}"
    return meaning.verdict() or table.differs_from(known)


async def _together(samples: Sequence[PlannedSample], fetch: Fetch) -> list[Captured | str]:
    tasks = [asyncio.create_task(_try(fetch, sample)) for sample in samples]
    try:
        return await asyncio.gather(*tasks)
    finally:  # the first error leaves the others running
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _try(fetch: Fetch, sample: PlannedSample, *, alone: bool = False) -> Captured | str:
    """The states of a sample, or the words of a refusal."""
    try:
        return await fetch(sample, alone=alone)
    except SampleRefusedError as error:
        return str(error)


def _looked_at(
    sample: PlannedSample,
    batched: Captured | str,
    single: Captured | str,
    layout: ShardLayout,
    meaning: ShardMeaning,
    table: LayerTable,
) -> str | None:
    """Why a sample is unusable; else what its states mean and look like is counted.

    Raises QualityError where they depend on what else is at the server.
    """
    import torch

    for found in (batched, single):
        if (reason := _reason(sample, found, layout)) is not None:
            return reason
    assert isinstance(batched, Captured)  # a refusal is a reason
    assert isinstance(single, Captured)
    require_same(sample.sample_id, single, batched)
    mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
    meaning.look(sample.sample_id, batched.token_ids, mask, batched.states[:, -1])
    table.add(batched.states)
    return None


def _reason(sample: PlannedSample, found: Captured | str, layout: ShardLayout) -> str | None:
    if isinstance(found, str):
        return f"refused_by_server: {found}"
    layers = len(layout.layer_ids)
    return reason_against(sample.token_ids, found.token_ids, found.states, layers, layout.hidden_size)
