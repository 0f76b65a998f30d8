"""One sample from request to verdict: captured, checked, a second time where it fails, some also alone."""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.extraction.capture import Capture, Captured, SampleRefusedError
from eagle3_pipeline.extraction.checks import reason_against
from eagle3_pipeline.extraction.layer_table import LayerTable, measured
from eagle3_pipeline.extraction.plan import PlannedSample
from eagle3_pipeline.likeness import difference
from eagle3_pipeline.shards.format import ShardLayout

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What became of one sample: its states, or why they must not be used."""

    captured: Captured | None
    reason: str = ""
    was_retried: bool = False
    was_compared: bool = False
    """Whether it was captured alone, too, and was the same."""
    layers: torch.Tensor | None = None
    """What its layers look like (`layer_table.measured`), where it has states."""


class Fetch(Protocol):
    """Where states come from: the server, or files that were captured before.

    `again` says that what came the first time was not right: the same file is no second try.
    """

    async def __call__(
        self, sample: PlannedSample, *, alone: bool = False, again: bool = False
    ) -> Captured: ...


def from_server(capture: Capture) -> Fetch:
    """Ask the extraction server."""

    async def fetch(sample: PlannedSample, *, alone: bool = False, again: bool = False) -> Captured:
        return await capture.fetch(sample.token_ids, alone=alone)

    return fetch


class Alone(Protocol):
    """Where the states of a sample that was alone at the server come from (alone.py)."""

    def expect(self, samples: Iterable[PlannedSample]) -> None: ...

    async def captured(self, sample: PlannedSample) -> Captured: ...

    async def forget(self, sample: PlannedSample) -> None: ...


class Inspector:
    """Fetches samples and judges their states; used by many at the same time."""

    def __init__(
        self, fetch: Fetch, layout: ShardLayout, table: LayerTable, *, alone: Alone | None = None
    ) -> None:
        """Without `alone`, no sample is compared with what it is by itself."""
        self._fetch = fetch
        self._alone = alone
        self._layout = layout
        self._table = table

    async def outcome(self, sample: PlannedSample) -> Outcome:
        """The states of a sample, or the reason why they are unusable also the second time.

        One in a hundred is compared with its capture alone before anybody has its states: so each of these
        that is in a part was compared. Raises QualityError where they differ, and what Capture.fetch raises.
        """
        found = await self._try(sample)
        if found.captured is None and found.reason != _REFUSED:
            _logger.warning(f"{sample.sample_id}: {found.reason}; it is captured once more")
            found = replace(await self._try(sample, again=True), was_retried=True)
        if self._alone is None or not sample.is_compared:
            return found
        if found.captured is None:
            await self._alone.forget(sample)
            return found
        try:
            alone = await self._alone.captured(sample)
        except SampleRefusedError as error:
            return replace(found, captured=None, reason=_refused(sample, error))
        await asyncio.to_thread(require_same, sample.sample_id, alone, found.captured)
        return replace(found, was_compared=True)

    def compares(self, sample: PlannedSample) -> bool:
        """Whether this sample is captured alone, too."""
        return self._alone is not None and sample.is_compared

    def expect(self, samples: Iterable[PlannedSample]) -> None:
        """A shard is reached: what of its samples is compared may be captured alone from now on."""
        if self._alone is not None:
            self._alone.expect(samples)

    async def _try(self, sample: PlannedSample, *, again: bool = False) -> Outcome:
        try:
            captured = await self._fetch(sample, again=again)
        except SampleRefusedError as error:
            return Outcome(None, _refused(sample, error))
        return await asyncio.to_thread(self._judge, sample, captured)

    def _judge(self, sample: PlannedSample, captured: Captured) -> Outcome:
        count, hidden = len(self._layout.layer_ids), self._layout.hidden_size
        reason = reason_against(sample.token_ids, captured.token_ids, captured.states, count, hidden)
        if reason is not None:
            return Outcome(None, reason)
        layers = measured(captured.states)
        reason = self._table.reason_in(layers)
        return Outcome(None, reason) if reason else Outcome(captured, layers=layers)


_REFUSED = "refused_by_server"


def _refused(sample: PlannedSample, error: SampleRefusedError) -> str:
    _logger.warning(f"the extraction server refuses {sample.sample_id}: {error}")
    return _REFUSED


def require_same(sample_id: str, alone: Captured, among_others: Captured) -> None:
    """Raise QualityError where two captures of one sample differ by more than rounding."""
    if (found := difference(alone.states, among_others.states)) is not None:
        raise QualityError(
            f"the states of {sample_id}, captured alone, differ from those captured among others: {found}. "
            "This server's states depend on what else is at it, so none of them can be trusted. Look at "
            "server.extraction.extra_args and the version of vLLM."
        )
