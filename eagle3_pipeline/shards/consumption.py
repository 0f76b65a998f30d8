"""Shards whose states were deleted after a checkpoint had learned from them: the waves of a training.

    <shard>/
        manifest.json     stays: the shard counts as made
        consumed.json     by which checkpoint, in which turn; written before the first part is deleted

So a shard without parts and without `consumed.json` is damaged, and one with it is not.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle3_pipeline.durable_files import fsync_folder, write_json
from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.manifest import MANIFEST_NAME, read_manifest

CONSUMED_NAME = "consumed.json"


@dataclass(frozen=True)
class Consumption:
    """What became of the states of a shard."""

    by: str
    """Digest of the checkpoint that learned from them."""
    turn: int
    """Number of the turn that it ended, from 0."""
    manifest: str
    """Digest of the shard's manifest."""


def consumption(folder: Path) -> Consumption | None:
    """Who consumed the shard at `folder`, None where its states are kept; raises DamagedFile."""
    path = folder / CONSUMED_NAME
    try:
        return Consumption(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DamagedFile(
            f"{path} does not say by which checkpoint the shard was consumed ({error}). Delete it and "
            "materialise hidden_state_shards to make the states again."
        ) from error


def mark_consumed(folder: Path, by: str, turn: int) -> None:
    """Write down that the checkpoint with digest `by` needs these states no more, then delete them.

    To be called when the checkpoint is durable. Called again, it finishes a deletion that was killed;
    the first record stands. Raises MissingInput unless the shard is complete or consumed.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        raise MissingInput(f"no {path}: a shard that is not complete cannot have been learned from.")
    manifest = read_manifest(path)
    if consumption(folder) is None:
        write_json(folder / CONSUMED_NAME, asdict(Consumption(by, turn, manifest.digest)))
    for entry in manifest.files:
        (folder / entry.path).unlink(missing_ok=True)
    fsync_folder(folder)
