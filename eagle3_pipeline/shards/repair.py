"""Complete shards that are to be made again: those of which a part was lost, and those that were consumed.

A lost part is found without reading the others' data, and the shard is opened to be completed:

    1. damaged parts are deleted
    2. the sound ones are listed in the journal, as if a kill had come before the manifest
    3. the manifest is set aside: from here on the shard is not complete
    4. a ShardWriter goes on with the samples that no listed part holds

Killed before 3, the shard still counts as complete and is still found damaged, so it all begins again.
"""

import logging
from pathlib import Path

from eagle3_pipeline.durable_files import fsync_folder, sha256_of_file
from eagle3_pipeline.journal import Journal
from eagle3_pipeline.manifest import MANIFEST_NAME, Place
from eagle3_pipeline.shards.consumption import CONSUMED_NAME, consumption
from eagle3_pipeline.shards.format import read_header
from eagle3_pipeline.shards.listing import JOURNAL_NAME, flaw_of

SET_ASIDE_NAME = MANIFEST_NAME + ".set-aside"
"""The manifest of a shard that is made again, until the next one is set aside."""

_logger = logging.getLogger(__name__)


def damaged_parts(place: Place) -> dict[Path, str]:
    """Parts of a complete shard that are missing, of another size or of a wrong header, each with its flaw.

    Checksums are not compared: `eagle3 shards inspect --verify` does that. A consumed shard has no damage.
    Raises MissingInput for a shard that is not complete.
    """
    manifest = place.require()
    if consumption(place.folder) is not None:
        return {}
    paths = {place.folder / entry.path: entry.bytes for entry in manifest.files}
    flaws = {path: flaw_of(path, size) for path, size in paths.items()}
    return {path: flaw for path, flaw in flaws.items() if flaw is not None}


def reopen(place: Place) -> None:
    """Make a complete shard incomplete such that its sound parts are kept by the next ShardWriter.

    Checksums are compared here, since the manifest that has them goes: a flipped bit in another part must
    not get a new checksum. Raises MissingInput for a shard that is not complete, Busy.
    """
    place.require()
    with Journal(place.folder / JOURNAL_NAME, place.fingerprint) as journal:
        manifest = place.require()  # another process may have mended the shard before we had the lock
        records = []
        for entry in manifest.files:
            path = place.folder / entry.path
            flaw = flaw_of(path, entry.bytes)
            if flaw is None and sha256_of_file(path) != entry.sha256:
                flaw = "has another checksum than its manifest says"
            if flaw is not None:
                _logger.warning(f"{path} {flaw}: the samples in it are made again")
                path.unlink(missing_ok=True)
                continue
            header = read_header(path)
            samples, tokens = len(header.sample_ids), header.tokens
            records.append(
                {
                    "part": entry.path,
                    "bytes": entry.bytes,
                    "sha256": entry.sha256,
                    "samples": samples,
                    "tokens": tokens,
                }
            )
        journal.append(records)
        _set_manifest_aside(place.folder)


def forget(place: Place) -> None:
    """Let a consumed shard be made again; nothing happens where none is. Raises Busy."""
    if consumption(place.folder) is None:
        return
    with Journal(place.folder / JOURNAL_NAME, place.fingerprint):
        # Another process may have forgotten it before we had the lock, and made it again.
        if consumption(place.folder) is not None:
            # In this order: after a kill in between, the shard is complete without parts: made again too.
            (place.folder / CONSUMED_NAME).unlink()
            _set_manifest_aside(place.folder)


def _set_manifest_aside(folder: Path) -> None:
    """Make the shard at `folder` incomplete; what its parts hold stays."""
    if (folder / MANIFEST_NAME).exists():
        (folder / MANIFEST_NAME).replace(folder / SET_ASIDE_NAME)
    fsync_folder(folder)
