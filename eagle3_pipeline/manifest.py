"""The manifest of a made thing: written last, so that its existence means that the thing is complete.

    <storage root>/<recipe slug>/<asset>/<fingerprint, 12 hex>[/<shard>]/
        ...files of the thing...
        manifest.json

`fingerprint` covers the inputs and the settings that the thing depends on; `digest` covers what
came out: names, sizes and checksums of the files, or of a model that lies elsewhere the
`model_fingerprint` of the facts. Nothing complete is ever overwritten.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle3_pipeline.durable_files import fsync_file, fsync_folder, sha256_of_file, write_json
from eagle3_pipeline.errors import DamagedFile, MissingInput
from eagle3_pipeline.provenance import fingerprint, git_commit, versions

MANIFEST_NAME = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class FileEntry:
    """One file of a made thing: its path relative to the manifest, its size and its SHA-256."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a complete thing is and what made it. `facts` are numbers for people and later steps."""

    asset: str
    fingerprint: str
    files: tuple[FileEntry, ...]
    inputs: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    made_by: dict[str, Any] = field(default_factory=dict)
    made_at: str = ""
    shard: str | None = None
    format: int = _FORMAT

    @property
    def digest(self) -> str:
        """Identity of what came out: the same bytes give the same digest, whenever they were made."""
        files: list[Any] = [asdict(entry) for entry in self.files]
        if not files and "model_fingerprint" in self.facts:
            files = [self.facts["model_fingerprint"]]
        return fingerprint([self.asset, self.fingerprint, self.shard, files])

    @property
    def bytes(self) -> int:
        """Size of all files of the thing."""
        return sum(entry.bytes for entry in self.files)


@dataclass(frozen=True)
class Place:
    """Where one thing lies, or will lie, and what its fingerprint is made of."""

    folder: Path
    asset: str
    fingerprint: str
    inputs: dict[str, Any]
    shard: str | None = None

    def manifest(self) -> Manifest | None:
        """The manifest if the thing is complete, else None; raises DamagedFile."""
        path = self.folder / MANIFEST_NAME
        if not path.exists():
            return None
        found = read_manifest(path)
        if (found.asset, found.fingerprint, found.shard) != (self.asset, self.fingerprint, self.shard):
            raise DamagedFile(
                f"{path} is of {found.asset} {found.fingerprint[:12]} {found.shard or ''}, expected "
                f"{self.asset} {self.fingerprint[:12]} {self.shard or ''}. Was the folder "
                "moved or copied by hand?"
            )
        return found

    def require(self) -> Manifest:
        """The manifest; raises MissingInput with the asset to materialise."""
        found = self.manifest()
        if found is None:
            name = f"{self.asset} {self.shard}" if self.shard else self.asset
            raise MissingInput(
                f"{name} is not made yet: no {self.folder / MANIFEST_NAME}. Materialise it first."
            )
        return found

    def finish(
        self, files: Iterable[Path], facts: dict[str, Any], checksums: Mapping[Path, str] | None = None
    ) -> Manifest:
        """Checksum and fsync `files` (below the folder), then write the manifest, last and atomically.

        `checksums` has the SHA-256 of files that were hashed while they were written: those are not read.
        """
        known = checksums or {}
        entries = []
        for path in sorted(files):
            fsync_file(path)
            name = path.relative_to(self.folder).as_posix()
            entries.append(FileEntry(name, path.stat().st_size, known.get(path) or sha256_of_file(path)))
        fsync_folder(self.folder)
        manifest = Manifest(
            asset=self.asset,
            fingerprint=self.fingerprint,
            files=tuple(entries),
            inputs=self.inputs,
            facts=facts,
            made_by={"versions": versions(), "commit": git_commit()},
            made_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            shard=self.shard,
        )
        write_json(self.folder / MANIFEST_NAME, {**asdict(manifest), "digest": manifest.digest})
        return manifest

    def verify(self) -> Manifest:
        """The manifest, after comparing every file with its size and checksum; raises DamagedFile."""
        manifest = self.require()
        for entry in manifest.files:
            path = self.folder / entry.path
            size = path.stat().st_size if path.exists() else None
            if size != entry.bytes or sha256_of_file(path) != entry.sha256:
                raise DamagedFile(
                    f"{path}: {size} bytes, expected {entry.bytes} bytes with checksum {entry.sha256[:12]}. "
                    f"Delete {self.folder / MANIFEST_NAME} and materialise {self.asset} again."
                )
        return manifest


def read_manifest(path: Path) -> Manifest:
    """Read one manifest; raises DamagedFile if it is not one of a known format or was edited."""
    try:
        value = json.loads(path.read_text())
        digest = value.pop("digest")
        value["files"] = tuple(FileEntry(**entry) for entry in value["files"])
        manifest = Manifest(**value)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(
            f"{path} is not a manifest ({error}). Delete it to make the thing again."
        ) from error
    if manifest.format != _FORMAT or manifest.digest != digest:
        raise DamagedFile(
            f"{path}: format {manifest.format} with digest {str(digest)[:12]}, expected format {_FORMAT} "
            f"with digest {manifest.digest[:12]}. Delete it to make the thing again."
        )
    return manifest
