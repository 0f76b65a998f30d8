"""The work on one shard: its plan, the samples that are still missing, its writer, its manifest."""

import logging
import time
from collections import Counter
from dataclasses import dataclass

import torch

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.extraction.capture import Captured
from eagle3_pipeline.extraction.plan import PlannedSample, ShardPlan
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.shards.format import ShardLayout, bytes_of_states
from eagle3_pipeline.shards.writer import ShardWriter

MAX_QUARANTINED_SHARE = 0.01
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What became of one sample: its states, or why they must not be used."""

    captured: Captured | None
    reason: str = ""


class ShardExtraction:
    """One shard that is being extracted. Opening it takes the shard's lock (Busy) and finds kept parts."""

    def __init__(self, place: Place, plan: ShardPlan, layout: ShardLayout, part_bytes: int) -> None:
        self.place = place
        self._plan = plan
        self._quarantined: Counter[str] = Counter()
        self._started = time.monotonic()
        self._writer = ShardWriter(place.folder, layout, part_bytes, place.fingerprint)
        self.kept = len(self._writer.done)
        if self.kept:
            _logger.info(
                f"extraction of {place.shard}: {self.kept:,} of {len(plan.samples):,} samples are kept "
                "from before"
            )

    @property
    def missing(self) -> list[PlannedSample]:
        """The samples that no finished part holds."""
        return [sample for sample in self._plan.samples if sample.sample_id not in self._writer.done]

    @property
    def standing(self) -> int:
        """Samples that need no request: skipped, or kept from before."""
        return self.kept + sum(self._plan.skipped.values())

    def take(self, sample: PlannedSample, outcome: Outcome) -> None:
        """Hand a sample to the writer, or count it as quarantined.

        Raises QualityError when more than 1 % of the shard's samples are quarantined; a single one
        is always tolerated, or a small shard could never be made.
        """
        if outcome.captured is not None:
            self._writer.add(
                sample.sample_id,
                outcome.captured.states,
                outcome.captured.token_ids,
                torch.tensor(sample.loss_mask, dtype=torch.bool),
            )
            return
        self._quarantined[outcome.reason] += 1
        _logger.warning(
            f"extraction of {self.place.shard}: {sample.sample_id} is quarantined: {outcome.reason}"
        )
        count, total = self._quarantined.total(), len(self._plan.samples)
        if count > max(1.0, MAX_QUARANTINED_SHARE * total):
            raise QualityError(
                f"{count} of {total} samples of {self.place.shard} have unusable hidden states "
                f"({dict(self._quarantined)}), at most {MAX_QUARANTINED_SHARE:.0%} are tolerated. Look at "
                "the extraction server's flags and log (prefix caching, dtype, layers), then materialise "
                "hidden_state_shards again: finished parts are kept."
            )

    def finish(self) -> Manifest:
        """Write the last part and the manifest."""
        layout = self._writer.layout
        parts = self._writer.complete()
        facts = {
            "samples": len(self._writer.done),
            "tokens": self._writer.tokens,
            "parts": len(parts),
            "bytes_of_states": bytes_of_states(
                self._writer.tokens, len(layout.layer_ids), layout.hidden_size
            ),
            "layers": list(layout.layer_ids),
            "quarantined": dict(self._quarantined),
            "skipped": self._plan.skipped,
            "seconds": round(time.monotonic() - self._started, 3),
        }
        manifest = self.place.finish(parts, facts)
        self._writer.close(finished=True)
        return manifest

    def close(self) -> None:
        """Free the shard's lock; what is not in a part yet is made again by the next run."""
        self._writer.close()
