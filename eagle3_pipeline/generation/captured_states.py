"""States that come with the replies: from the server's staging folder to where the extraction looks for them.

    staging/captured/<request id>.safetensors           the server's; emptied before and after
    captured/<fp12>/p500-s007/<sample id>.safetensors   renamed, before the sample is in the journal

Only with `extraction.while_generating`. A file may be missing: the sample is recorded all the same, and the
extraction server makes its states later. So nothing here has to survive a power loss. Each file holds the ids
that it is of, so one that an earlier, lost reply left is known for what it is.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from eagle3_pipeline.errors import NotEnoughRoom, ServerRefused
from eagle3_pipeline.lineage import Lineage
from eagle3_pipeline.samples.folder_bytes import bytes_below
from eagle3_pipeline.samples.sample import Sample
from eagle3_pipeline.staging import FILE_SUFFIX, WriteFailed, staging_folder, wait_for_file

WANTS_STATES = {"kv_transfer_params": {"include_output_tokens": True}}
"""What a question carries whose reply is to come with its states, those of the reply included."""

_logger = logging.getLogger(__name__)

# From the reply to its file. Samples that are recorded together wait together, and so does their fsync.
_FILE_S = 20.0
# A file that nobody took by then is of a request that was given up.
_STALE_S, _SWEEP_EVERY_S = 600.0, 60.0


class CapturedStates:
    """The files of one life of a server that writes into `staging`."""

    def __init__(self, lineage: Lineage, staging: Path) -> None:
        self._lineage = lineage
        self._staging = staging
        self._named: dict[str, Path] = {}
        self._swept_at = time.time()
        self._has_room = True
        storage = lineage.recipe.storage
        self._keep_free = int(storage.keep_free_gib * 2**30)
        # Replies are nothing beside states, so only those that are kept here are counted from now on.
        self._budget_left = (
            None if storage.max_gib is None else int(storage.max_gib * 2**30) - bytes_below(lineage.folder)
        )

    def expect(self, sample_id: str, file: Path | None) -> None:
        """Note which file a reply named; raises ServerRefused where it is no server that captures for us."""
        if file is None or file.parent.resolve() != self._staging.resolve():
            raise ServerRefused(
                f"the reply to {sample_id} names {file} for its hidden states, expected a file in "
                f"{self._staging}. The server was started otherwise: stop it (`eagle3 server stop`) and "
                "materialise synthetic_samples again, or set extraction.while_generating to false."
            )
        self._named[sample_id] = file

    async def keep(self, samples: Mapping[str, Sequence[Sample]]) -> None:
        """Move the files of samples, which are given by their shards; returns when none is awaited."""
        self._sweep()
        waits = []
        for shard, listed in samples.items():
            folder = self._lineage.captured(shard)
            folder.mkdir(parents=True, exist_ok=True)
            named = [(sample, self._named.pop(sample.sample_id, None)) for sample in listed]
            waits += [self._keep(sample, file, folder) for sample, file in named if file is not None]
        await asyncio.gather(*waits)

    async def _keep(self, sample: Sample, file: Path, folder: Path) -> None:
        try:
            await wait_for_file(file, _FILE_S)
        except (NotEnoughRoom, WriteFailed, TimeoutError) as error:
            _logger.warning(f"{sample.sample_id} is recorded without its hidden states: {error}")
            return
        size = file.stat().st_size
        self._look_at_room(size)
        if self._has_room and sample.trains(self._lineage.recipe.generation.train_truncated):
            if self._budget_left is not None:
                self._budget_left -= size
            file.replace(folder / f"{sample.sample_id}{FILE_SUFFIX}")
        else:
            file.unlink()

    def _look_at_room(self, size: int) -> None:
        had_room, lacking = self._has_room, self._lacking(size)
        self._has_room = lacking is None
        if had_room and not self._has_room:
            _logger.warning(
                f"{lacking}: samples are recorded without hidden states, which the extraction server makes "
                "later."
            )

    def _lacking(self, size: int) -> str | None:
        """Which limit a file of this size, which is there already, would pass."""
        if shutil.disk_usage(self._staging).free < self._keep_free:
            return (
                f"less than storage.keep_free_gib ({self._keep_free / 2**30:g} GiB) is free on the disk of "
                f"{self._staging}"
            )
        if self._budget_left is not None and self._budget_left < size:
            return f"storage.max_gib ({self._lineage.recipe.storage.max_gib:g}) is used up"
        return None

    def _sweep(self) -> None:
        now = time.time()
        if now - self._swept_at < _SWEEP_EVERY_S:
            return
        self._swept_at = now
        for file in self._staging.glob(f"*{FILE_SUFFIX}"):
            if now - file.stat().st_mtime > _STALE_S:
                file.unlink()


@contextmanager
def captured_states(lineage: Lineage) -> Iterator[CapturedStates | None]:
    """Hold the staging folder of the server that generates; None where the recipe captures nothing there.

    Raises Busy: the folder has one user at a time, so two processes cannot generate at once.
    """
    if (folder := capture_staging(lineage)) is None:
        yield None
        return
    with staging_folder(folder) as staging:
        yield CapturedStates(lineage, staging)


def capture_staging(lineage: Lineage) -> Path | None:
    """Where the server that generates leaves states, on the disk of `Lineage.captured`; None without them."""
    captures = lineage.recipe.extraction.while_generating
    return lineage.staging.with_name("captured") if captures else None
