"""What `eagle3 shards inspect PATH` tells: parts, samples, layers and sizes of shards. Needs no torch."""

from pathlib import Path

from eagle3_pipeline.durable_files import sha256_of_file
from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.manifest import MANIFEST_NAME, Manifest, read_manifest
from eagle3_pipeline.shards.format import read_header
from eagle3_pipeline.shards.listing import parts_of_shard


def inspect_shards(path: Path, *, verify: bool = False) -> str:
    """Describe the shard at `path`, or all shards in the folder `path`, one paragraph each.

    `verify` reads every byte and compares the checksums. Raises MissingInput where there is no
    shard and DamagedFile where a part is not what manifest or format say.
    """
    folders = [path] if (path / MANIFEST_NAME).is_file() else _shards_in(path)
    if not folders:
        raise MissingInput(
            f"no hidden-state shard in {path}: expected a folder with {MANIFEST_NAME}, or one of such."
        )
    return "\n\n".join(_describe(folder, verify=verify) for folder in folders)


def _shards_in(path: Path) -> list[Path]:
    if not path.is_dir():
        raise MissingInput(f"no folder {path}")
    return sorted(manifest.parent for manifest in path.glob(f"*/{MANIFEST_NAME}"))


def _describe(folder: Path, *, verify: bool) -> str:
    manifest = read_manifest(folder / MANIFEST_NAME)
    if manifest.asset != "hidden_state_shards":
        raise DamagedFile(
            f"{folder} holds {manifest.asset}, expected hidden_state_shards. Give another path."
        )
    lines = [f"{folder}  made {manifest.made_at}  digest {manifest.digest[:12]}"]
    for part in parts_of_shard(folder):
        header = read_header(part)
        layout = header.layout
        lines.append(
            f"  {part.name}  {len(header.sample_ids):,} samples  {header.tokens:,} tokens  "
            f"{header.file_bytes / 2**20:,.1f} MiB  layers {list(layout.layer_ids)} x "
            f"{layout.hidden_size} bf16  model {layout.model_fingerprint[:12]}"
        )
        if verify:
            _compare(manifest, part)
    lines.append(
        f"  left out: {_counts(manifest, 'quarantined')} quarantined, {_counts(manifest, 'skipped')} skipped"
    )
    lines.append(
        f"  {len(manifest.files)} parts, {manifest.bytes / 2**20:,.1f} MiB" + ", checksums right" * verify
    )
    return "\n".join(lines)


def _compare(manifest: Manifest, part: Path) -> None:
    expected = next(entry.sha256 for entry in manifest.files if entry.path == part.name)
    found = sha256_of_file(part)
    if found != expected:
        raise DamagedFile(
            f"{part}: checksum {found[:12]}, the manifest says {expected[:12]}. Delete {part.parent} and "
            "materialise hidden_state_shards again."
        )


def _counts(manifest: Manifest, fact: str) -> str:
    counts = manifest.facts.get(fact) or {}
    return ", ".join(f"{number} {reason}" for reason, number in sorted(counts.items())) or "0"
