"""One sample from request to verdict: captured, checked, a second time where it fails, some also alone."""

import asyncio
import hashlib
import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.extraction.capture import Capture, Captured, SampleRefusedError
from eagle3_pipeline.extraction.checks import reason_against
from eagle3_pipeline.extraction.layer_table import LayerTable
from eagle3_pipeline.extraction.plan import PlannedSample
from eagle3_pipeline.shards.format import ShardLayout

_logger = logging.getLogger(__name__)

_ONE_IN = 100
# Per layer, the median over rows of the cosine between two captures of the same ids. Other company in a
# batch changes the last bits of a rounding (above 0.9999 here); a token that takes other experts for it moves
# single rows, which the median leaves out. States of another request are far below.
LEAST_COSINE = 0.99


@dataclass(frozen=True)
class Outcome:
    """What became of one sample: its states, or why they must not be used."""

    captured: Captured | None
    reason: str = ""
    was_retried: bool = False


class Fetch(Protocol):
    """Where states come from: the server, or files that were captured before."""

    async def __call__(self, sample: PlannedSample, *, alone: bool = False) -> Captured: ...


def from_server(capture: Capture) -> Fetch:
    """Ask the extraction server."""

    async def fetch(sample: PlannedSample, *, alone: bool = False) -> Captured:
        return await capture.fetch(sample.token_ids, alone=alone)

    return fetch


class Inspector:
    """Fetches samples and judges their states; used by many at the same time."""

    def __init__(self, fetch: Fetch, layout: ShardLayout, table: LayerTable, *, compare: bool = True) -> None:
        """`compare`: whether a server is there that captures a sample again alone."""
        self._fetch = fetch
        self._compare = compare
        self._layout = layout
        self._table = table

    async def outcome(self, sample: PlannedSample) -> Outcome:
        """The states of a sample, or the reason why they are unusable also the second time.

        Raises what Capture.fetch raises.
        """
        captured, reason = await self._try(sample)
        if was_retried := captured is None and reason != _REFUSED:
            _logger.warning(f"{sample.sample_id}: {reason}; it is captured once more")
            captured, reason = await self._try(sample)
        return Outcome(captured, reason, was_retried)

    def compares(self, sample: PlannedSample) -> bool:
        """Whether this sample is to be captured again alone."""
        return self._compare and is_compared(sample.sample_id)

    async def compare(self, sample: PlannedSample, among_others: Captured) -> None:
        """Capture a sample again alone; raises QualityError where its states differ from `among_others`."""
        alone = await self._fetch(sample, alone=True)
        await asyncio.to_thread(require_same, sample.sample_id, alone, among_others)

    async def _try(self, sample: PlannedSample) -> tuple[Captured | None, str]:
        try:
            captured = await self._fetch(sample)
        except SampleRefusedError as error:
            _logger.warning(f"the extraction server refuses {sample.sample_id}: {error}")
            return None, _REFUSED
        reason = await asyncio.to_thread(self._reason, sample, captured)
        return (None, reason) if reason else (captured, "")

    def _reason(self, sample: PlannedSample, captured: Captured) -> str | None:
        layers, hidden = len(self._layout.layer_ids), self._layout.hidden_size
        reason = reason_against(sample.token_ids, captured.token_ids, captured.states, layers, hidden)
        return reason or self._table.judge(captured.states)


_REFUSED = "refused_by_server"


def is_compared(sample_id: str) -> bool:
    """Whether this sample is one of the hundred that is captured again alone; the same ones in every run."""
    return int.from_bytes(hashlib.sha256(sample_id.encode()).digest()[:4], "big") % _ONE_IN == 0


def require_same(sample_id: str, alone: Captured, among_others: Captured) -> None:
    """Raise QualityError where two captures of one sample differ by more than rounding."""
    cosines = torch.full((1,), -1.0)
    if alone.states.shape == among_others.states.shape:
        cosines = torch.cosine_similarity(alone.states.float(), among_others.states.float(), dim=-1)
        cosines = cosines.median(dim=0).values
    if float(cosines.min()) < LEAST_COSINE:
        raise QualityError(
            f"the states of {sample_id}, captured alone, differ from those captured among others: cosines "
            f"by layer {[round(value, 3) for value in cosines.tolist()]}, expected {LEAST_COSINE} at least. "
            "This server's states depend on what else is at it, so none of them can be trusted. Look at "
            "server.extraction.extra_args and the version of vLLM."
        )
