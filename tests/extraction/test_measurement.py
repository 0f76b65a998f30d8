import asyncio

import torch

from eagle3_pipeline.extraction.capture import Captured, SampleRefusedError
from eagle3_pipeline.extraction.layer_table import LayerTable
from eagle3_pipeline.extraction.measurement import measure
from eagle3_pipeline.extraction.plan import PlannedSample
from eagle3_pipeline.shards.format import ShardLayout

LAYERS, HIDDEN = (1, 2), 8
LAYOUT = ShardLayout(LAYERS, HIDDEN, "m" * 64)
SAMPLES = [PlannedSample(f"{number}-t0", list(range(9, 20 + number)), [1] * 11) for number in range(36)]


def _states(tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, len(LAYERS), HIDDEN, generator=generator).to(torch.bfloat16)


def _measured(samples: list[PlannedSample]) -> tuple[LayerTable, int]:
    asked = 0

    async def fetch(sample: PlannedSample, *, alone: bool = False, again: bool = False) -> Captured:
        nonlocal asked
        asked += 1
        if sample is SAMPLES[3]:
            raise SampleRefusedError("HTTP 400")
        states = _states(len(sample.token_ids)) * (float("nan") if sample is SAMPLES[5] else 1)
        return Captured(torch.tensor(sample.token_ids), states)

    table = LayerTable(LAYERS)
    asyncio.run(measure(samples, fetch, LAYOUT, table))
    return table, asked


def test_a_table_is_settled_though_some_samples_are_unusable() -> None:
    table, asked = _measured(SAMPLES)
    assert asked == 36
    assert table.is_settled
    assert table.samples == 34
    assert table.judge(_states(20) * 64) == "scale_differs"


def test_samples_that_are_too_few_to_settle_a_table_are_not_asked_for() -> None:
    table, asked = _measured(SAMPLES[:31])
    assert (asked, table.samples) == (0, 0)
