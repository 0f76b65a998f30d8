"""One shard at work: its conversations, its journal, and how it becomes a finished shard.

    synthetic_samples/<fp12>/p500-s007/
        replies.jsonl        the journal, while it is being made (with replies.jsonl.lock)
        samples.parquet      then all samples, in the order of the prompts and their turns
        manifest.json        last; after it the journal goes

The journal's lock keeps a second process out of the shard. It is taken before any request is sent.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.generation.concurrency import Reading, history
from eagle3_pipeline.generation.conversation import Conversation
from eagle3_pipeline.journal import Journal
from eagle3_pipeline.manifest import Manifest, Place
from eagle3_pipeline.prompts.prompt import Prompt
from eagle3_pipeline.samples.lengths import histogram
from eagle3_pipeline.samples.sample import VERDICTS, Sample
from eagle3_pipeline.samples.shard_file import SAMPLES_NAME, write_samples

JOURNAL_NAME = "replies.jsonl"


class ShardGeneration:
    """A shard that is being made; a context manager that holds its lock."""

    def __init__(self, place: Place, prompts: list[Prompt], judges: Collection[str] = ()) -> None:
        """Open the shard and take up what is recorded; raises Busy and DamagedFile.

        `judges` are the ids of the prompts that judge the draft.
        """
        self.place = place
        self.conversations = [Conversation(one, is_greedy=one.prompt_id in judges) for one in prompts]
        self.started_at: float | None = None
        self.is_finished = False
        self._of_prompt = {one.prompt.prompt_id: one for one in self.conversations}
        # Where the record of each sample begins in the journal.
        self._recorded: dict[str, int] = {}
        self._journal = Journal(place.folder / JOURNAL_NAME, place.fingerprint, slim=_without_ids)
        try:
            self._take_up()
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """The shard's name, `p500-s007`."""
        return str(self.place.shard)

    @property
    def recorded(self) -> int:
        """Samples that are safe in the journal."""
        return len(self._recorded)

    @property
    def is_complete(self) -> bool:
        """Whether every turn that can be asked has its sample in the journal."""
        return all(
            one.turns_left == 0 and all(sample.sample_id in self._recorded for sample in one.samples)
            for one in self.conversations
        )

    @property
    def turns_left(self) -> int:
        """Turns that are still to be asked."""
        return sum(one.turns_left for one in self.conversations)

    def record(self, samples: list[Sample]) -> None:
        """Append samples to the journal; then they are on the disk, and in memory only what goes on."""
        offsets = self._journal.append(sample.to_record() for sample in samples)
        for sample, offset in zip(samples, offsets, strict=True):
            self._recorded[sample.sample_id] = offset
            self._of_prompt[sample.prompt_id].forget(sample.turn)

    def forget_unrecorded(self) -> None:
        """Take back replies that never came to the disk: they are asked for again."""
        for one in self.conversations:
            one.keep_only(self._recorded)

    def finish(self, readings: Sequence[Reading] = ()) -> Manifest:
        """Write the Parquet file, then the manifest, with the server's readings; then remove the journal."""
        path = self.place.folder / SAMPLES_NAME
        tally = _Tally()
        write_samples(path, map(tally.add, self._samples()))
        manifest = self.place.finish([path], {**tally.facts(), **self._facts(readings)})
        self.close()
        remove_journal(self.place)
        self.is_finished = True
        self.conversations, self._of_prompt = [], {}
        return manifest

    def close(self) -> None:
        """Free the lock; what is recorded stays."""
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _samples(self) -> Iterator[Sample]:
        """All samples as they were recorded, in the order of the prompts and their turns."""
        for conversation in self.conversations:
            for one in conversation.samples:
                yield Sample.from_record(self._journal.read(self._recorded[one.sample_id]))

    def _take_up(self) -> None:
        samples = [Sample.from_record(record) for record in self._journal.records]
        self._journal.records.clear()
        by_id = {sample.sample_id: sample for sample in samples}
        known = {name for one in self.conversations for name in one.sample_ids}
        if foreign := by_id.keys() - known:
            raise DamagedFile(
                f"{self._journal.path} has {len(foreign)} samples of prompts that are not in this shard, "
                f"first {min(foreign)}. Were the prompts made by another version? Move the journal away to "
                "start the shard again."
            )
        offsets = zip(samples, self._journal.offsets, strict=True)
        self._recorded = {sample.sample_id: offset for sample, offset in offsets}
        for one in self.conversations:
            one.take_up(by_id)
        for sample in samples:
            self._of_prompt[sample.prompt_id].forget(sample.turn)

    def _facts(self, readings: Sequence[Reading]) -> dict[str, Any]:
        seconds = time.monotonic() - self.started_at if self.started_at is not None else 0.0
        return {
            "turns_not_asked": sum(len(one.prompt.turns) - len(one.samples) for one in self.conversations),
            # Of the call that finished it: from the first request of the shard to its last reply.
            "seconds": round(seconds, 3),
            "server_history": history(readings, since=self.started_at or 0.0),
        }


class _Tally:
    """What is counted of the samples of a shard while they are written."""

    def __init__(self) -> None:
        self._verdicts: Counter[str] = Counter()
        self._lengths: list[int] = []
        self._prompt_tokens = 0

    def add(self, sample: Sample) -> Sample:
        """Count one sample and pass it on."""
        self._verdicts[sample.verdict] += 1
        self._prompt_tokens += len(sample.prompt_token_ids)
        if sample.verdict != "refused":
            self._lengths.append(len(sample.completion_token_ids))
        return sample

    def facts(self) -> dict[str, Any]:
        """The counts as facts of a manifest."""
        return {
            "samples": self._verdicts.total(),
            **{verdict: self._verdicts[verdict] for verdict in VERDICTS},
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": sum(self._lengths),
            "completion_lengths": histogram(self._lengths),
        }


def _without_ids(record: dict[str, Any]) -> dict[str, Any]:
    """A record as it is kept in memory: token ids as Python integers, of a whole run, would be gigabytes."""
    return {**record, "prompt_token_ids": [], "completion_token_ids": []}


def remove_journal(place: Place) -> None:
    """Remove what a finished shard no longer needs.

    The lock's file may go although another process could be opening it just now: whoever gets a lock
    of a finished shard sees the manifest and goes on.
    """
    for name in (JOURNAL_NAME, f"{JOURNAL_NAME}.lock"):
        Path(place.folder / name).unlink(missing_ok=True)
