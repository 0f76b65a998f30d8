"""What `eagle3 shards inspect PATH` tells: the headers, sizes and facts of shards. Needs no torch."""

import json
from itertools import pairwise
from pathlib import Path

from eagle3_pipeline.durable_files import sha256_of_file
from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.extraction.layers import CONVENTION
from eagle3_pipeline.manifest import MANIFEST_NAME, Manifest, read_manifest
from eagle3_pipeline.shards.consumption import consumption
from eagle3_pipeline.shards.format import FORMAT_VERSION, WAY_OUT, PartHeader, read_header, read_offsets
from eagle3_pipeline.shards.listing import parts_of_shard


def inspect_shards(path: Path, *, verify: bool = False) -> str:
    """Describe the shard at `path`, or all shards in the folder `path`, one paragraph each.

    Sizes, headers and offsets are checked; `verify` reads every byte and compares the checksums. Raises
    MissingInput where there is no shard and DamagedFile where a part is not what manifest or format say.
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
    if (consumed := consumption(folder)) is not None:
        end = f"states deleted: checkpoint {consumed.by[:12]} learned from them in turn {consumed.turn}"
    else:
        for part in parts_of_shard(folder):
            header = read_header(part)
            lines += _describe_part(part, header)
            if verify:
                _compare(manifest, part)
        checked = "checksums right" if verify else "sizes, headers and offsets right"
        end = f"{len(manifest.files)} parts, {manifest.bytes / 2**20:,.1f} MiB, {checked}"
    lines.append(
        f"  left out: {_counts(manifest, 'quarantined')} quarantined, {_counts(manifest, 'skipped')} skipped"
    )
    told = {"quarantined", "skipped"}
    lines += [f"  {name}: {json.dumps(value)}" for name, value in manifest.facts.items() if name not in told]
    return "\n".join([*lines, f"  {end}"])


def _describe_part(part: Path, header: PartHeader) -> list[str]:
    """The header of a part, its samples by length; raises DamagedFile for offsets that do not rise."""
    layout = header.layout
    offsets = read_offsets(part, header)
    lengths = [end - start for start, end in pairwise(offsets)]
    lines = [
        f"  {part.name}  {len(header.sample_ids):,} samples  {header.tokens:,} tokens  "
        f"{header.file_bytes / 2**20:,.1f} MiB  layers {list(layout.layer_ids)} x "
        f"{layout.hidden_size} {layout.precision}  model {layout.model_fingerprint[:12]}",
        f"    format {FORMAT_VERSION}, layer ids by {CONVENTION}, the last one before the final norm, kept "
        f"{layout.kept}",
        f"    {header.sample_ids[0]} to {header.sample_ids[-1]}, of {min(lengths)} to {max(lengths)} tokens",
    ]
    if layout.kept == "trained":
        read_offsets(part, header, "last_offsets")
        lines.append(f"    last layer on {header.trained_tokens:,} tokens of completions")
    return lines


def _compare(manifest: Manifest, part: Path) -> None:
    expected = next(entry.sha256 for entry in manifest.files if entry.path == part.name)
    found = sha256_of_file(part)
    if found != expected:
        raise DamagedFile(f"{part}: checksum {found[:12]}, the manifest says {expected[:12]}. {WAY_OUT}")


def _counts(manifest: Manifest, fact: str) -> str:
    counts = manifest.facts.get(fact) or {}
    return ", ".join(f"{number} {reason}" for reason, number in sorted(counts.items())) or "0"
