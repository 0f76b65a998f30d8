"""Which parts a complete shard has, by its manifest."""

from pathlib import Path

from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.manifest import MANIFEST_NAME, read_manifest

JOURNAL_NAME = "parts.journal"
"""Lists the complete parts of a shard that is being written; gone when the shard is complete."""


def parts_of_shard(folder: Path) -> list[Path]:
    """Paths of the parts in the manifest, their sizes compared; raises MissingInput and DamagedFile."""
    manifest_path = folder / MANIFEST_NAME
    if not manifest_path.exists():
        raise MissingInput(
            f"no {manifest_path}: the shard is not complete. Materialise hidden_state_shards first."
        )
    paths = []
    for entry in read_manifest(manifest_path).files:
        path = folder / entry.path
        size = path.stat().st_size if path.exists() else None
        if size != entry.bytes:
            raise DamagedFile(
                f"{path}: {'missing' if size is None else f'{size} bytes'}, the manifest says "
                f"{entry.bytes} bytes. Delete {manifest_path} and materialise hidden_state_shards again."
            )
        paths.append(path)
    return paths
