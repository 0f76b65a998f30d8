"""Which parts a complete shard has, by its manifest, and whether they are what they should be."""

from pathlib import Path

from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.manifest import MANIFEST_NAME, read_manifest
from eagle3_pipeline.shards.consumption import CONSUMED_NAME, consumption
from eagle3_pipeline.shards.format import WAY_OUT, ShardLayout, parse_header

JOURNAL_NAME = "parts.journal"
"""Lists the complete parts of a shard that is being written; gone when the shard is complete."""


def parts_of_shard(folder: Path) -> list[Path]:
    """Paths of the parts in the manifest, their sizes and headers checked.

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
        if (flaw := flaw_of(path, entry.bytes)) is not None:
            raise DamagedFile(f"{path} {flaw}. {WAY_OUT}")
        paths.append(path)
    return paths


def flaw_of(path: Path, size: int, layout: ShardLayout | None = None) -> str | None:
    """What is wrong with a part of `size` bytes, as the end of a sentence; its data are not read."""
    if not path.exists():
        return "is missing"
    if (found := path.stat().st_size) != size:
        return f"has {found} bytes, expected {size}"
    try:
        header = parse_header(path)
    except ValueError as error:
        return str(error)
    if layout is not None and header.layout != layout:
        return f"holds {header.layout}, expected {layout}"
    return None
