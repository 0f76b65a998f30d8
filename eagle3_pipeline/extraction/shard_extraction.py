"""The work on one shard: its plan, the samples that are still missing, its writer, its manifest."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from eagle3_pipeline.errors import QualityError
from eagle3_pipeline.extraction.inspection import Outcome
from eagle3_pipeline.extraction.layer_table import LayerTable
from eagle3_pipeline.extraction.plan import PlannedSample, ShardPlan
from eagle3_pipeline.extraction.quarantine import Quarantine
from eagle3_pipeline.extraction.shard_meaning import ShardMeaning, since
from eagle3_pipeline.extraction.space import SpaceWatch
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.shards.format import ShardLayout, bytes_of_sample
from eagle3_pipeline.shards.writer import ShardWriter

_logger = logging.getLogger(__name__)


class ShardExtraction:
    """One shard that is being extracted. Opening it takes the shard's lock (Busy) and finds kept parts."""

    def __init__(
        self,
        place: Place,
        plan: ShardPlan,
        layout: ShardLayout,
        part_bytes: int,
        *,
        meaning: ShardMeaning,
        table: LayerTable,
        space: SpaceWatch,
        quarantine: Quarantine,
        on_finished: Callable[[], None] = lambda: None,
    ) -> None:
        """`quarantine` is that of all shards of a call; `on_finished` is called when the manifest stands."""
        self.place = place
        self._plan = plan
        self._meaning = meaning
        self._table = table
        self._space = space
        self._of_call = quarantine
        self._on_finished = on_finished
        self._quarantined: dict[str, str] = {}
        self.compared = 0
        """Samples that were captured again alone."""
        self._retried = 0
        self._began_with = 0
        self._started = time.monotonic()
        self._writer = ShardWriter(place.folder, layout, part_bytes, place.fingerprint, note=self._note)
        quarantine.planned += len(plan.samples)
        self.kept = len(self._writer.done)
        self._began_with = self._writer.tokens
        for note in filter(None, self._writer.notes):  # parts of a shard that is mended have none
            meaning.add(note["meaning"])
            self._retried += note["retried"]
            self.compared += note["compared"]
        self._noted = self._counts()
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
        """Hand a sample to the writer, or count it as quarantined; raises QualityError for too many of these.

        Raises NotEnoughRoom.
        """
        self._retried += outcome.was_retried
        if outcome.captured is None:
            self._quarantine(sample, outcome.reason)
            return
        states, token_ids = outcome.captured.states, outcome.captured.token_ids
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        size = bytes_of_sample(sample.sample_id, len(mask), int(mask.sum()), self._writer.layout)
        self._space.take(size, self._writer.pending_bytes)
        self._writer.add(sample.sample_id, states, token_ids, mask)
        # After it: a part that the writer wrote just now does not hold this sample yet.
        self._meaning.look(sample.sample_id, token_ids, mask, states[:, -1])
        if outcome.layers is not None:
            self._table.add_measured(outcome.layers)
        self.compared += outcome.was_compared

    def _quarantine(self, sample: PlannedSample, reason: str) -> None:
        self._quarantined[sample.sample_id] = reason
        _logger.warning(f"extraction of {self.place.shard}: {sample.sample_id} is quarantined: {reason}")
        self._of_call.left_out += 1
        share, shard = self._of_call.max_share, str(self.place.shard)
        of_shard = Quarantine(share, len(self._plan.samples), len(self._quarantined))
        for found, where in ((of_shard, shard), (self._of_call, "the shards of this run so far")):
            if found.is_exceeded:
                raise QualityError(
                    f"{found.left_out} of {found.planned} samples of {where} have unusable hidden states "
                    f"(in {shard}: {self._reasons()}), at most {share:.1%} are tolerated "
                    "(extraction.max_quarantined_share). Look at the extraction server's flags and log "
                    "(prefix caching, dtype, layers), then materialise hidden_state_shards again: finished "
                    "parts are kept."
                )

    def _reasons(self) -> dict[str, int]:
        return dict(Counter(self._quarantined.values()))

    def _counts(self) -> dict[str, Any]:
        return {"meaning": self._meaning.counts(), "retried": self._retried, "compared": self.compared}

    def _note(self) -> dict[str, Any]:
        """What was counted since the last part, to stand beside the new one: a resumed shard adds them up."""
        counts, before = self._counts(), self._noted
        self._noted = counts
        return {
            "meaning": since(counts["meaning"], before["meaning"]),
            "retried": counts["retried"] - before["retried"],
            "compared": counts["compared"] - before["compared"],
        }

    def finish(self) -> Manifest:
        """Write the last part and the manifest.

        Raises QualityError where the states do not mean what was recorded; then the parts are given up, since
        another attempt must not take them for right.
        """
        layout = self._writer.layout
        parts = self._writer.complete()
        if (complaint := self._meaning.verdict()) is not None:
            self._writer.give_up()
            raise QualityError(f"the hidden states of {self.place.shard} are wrong: {complaint}")
        seconds = time.monotonic() - self._started
        captured = self._writer.tokens - self._began_with
        facts = {
            "samples": len(self._writer.done),
            "tokens": self._writer.tokens,
            "parts": len(parts),
            "layers": list(layout.layer_ids),
            "precision": layout.precision,
            "kept": layout.kept,
            "quarantined": self._reasons(),
            "quarantined_samples": self._quarantined,
            "retried": self._retried,
            "compared_alone": self.compared,
            "meaning": self._meaning.facts(),
            "layer_table": self._table.facts(),
            "skipped": self._plan.skipped,
            # Of the run that finished it, which may have found parts of an earlier one.
            "captured_tokens": captured,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(captured / max(seconds, 1e-9), 1),
        }
        manifest = self.place.finish(parts, facts, checksums=parts)
        self._writer.close(finished=True)
        self._on_finished()
        return manifest

    def give_up(self) -> None:
        """Delete the parts, which are not to be trusted; then close."""
        self._writer.give_up()

    def close(self) -> None:
        """Free the shard's lock; what is not in a part yet is made again by the next run."""
        self._writer.close()
