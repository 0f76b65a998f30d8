"""Which parts a complete shard has, by its manifest."""

from pathlib import Path

from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.manifest import MANIFEST_NAME, read_manifest
from eagle3_pipeline.shards.consumption import CONSUMED_NAME, consumption
from eagle3_pipeline.shards.format import WAY_OUT

JOURNAL_NAME = "parts.journal"
"""Lists the complete parts of a shard that is being written; gone when the shard is complete."""


def parts_of_shard(folder: Path) -> list[Path]:
    """Paths of the parts in the manifest, their sizes compared.

    Raises MissingInput for a shard that is not complete or was consumed, and DamagedFile.
    """
    manifest_path = folder / MANIFEST_NAME
    if not manifest_path.exists():
        raise MissingInput(
            f"no {manifest_path}: the shard is not complete. Materialise hidden_state_shards first."
        )
    if (consumed := consumption(folder)) is not None:
        raise MissingInput(
            f"the states of {folder} were deleted when checkpoint {consumed.by[:12]} had learned from them "
            f"(turn {consumed.turn}); its manifest stays. Delete {folder / CONSUMED_NAME} and materialise "
            "hidden_state_shards to make them again."
        )
    paths = []
    for entry in read_manifest(manifest_path).files:
        path = folder / entry.path
        size = path.stat().st_size if path.exists() else None
        if size != entry.bytes:
            raise DamagedFile(
                f"{path}: {'missing' if size is None else f'{size} bytes'}, the manifest says "
                f"{entry.bytes} bytes. {WAY_OUT}"
            )
        paths.append(path)
    return paths
