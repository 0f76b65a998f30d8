"""A release under its number: `v1`, `v2`, ... and `latest`, in one folder.

    <storage root>/<recipe slug>/released/<name>/v1 -> ../../released_draft/<fingerprint>
    <release.folder>/<name>/v1/                        a copy
    either one's latest -> v2                          the newest version, moved by rename, never back

A version is never changed. Its content is told by its SHA256SUMS: what has a number never gets a second one.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eagle3_pipeline.durable_files import fsync_folder
from eagle3_pipeline.errors import BadInput, DamagedFile
from eagle3_pipeline.manifest import FileEntry

LATEST = "latest"
SUMS_NAME = "SHA256SUMS"
_VERSION = re.compile(r"v([1-9][0-9]*)")


@dataclass(frozen=True)
class Version:
    """A finished release with its number. `files` are all that is published of `folder`."""

    name: str
    number: int
    folder: Path
    files: tuple[FileEntry, ...]

    @property
    def tag(self) -> str:
        """The number as folders and tags are named."""
        return f"v{self.number}"

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(entry.bytes for entry in self.files)

    def is_in(self, folder: Path) -> bool:
        """Whether `folder` holds this release, by its checksums."""
        sums = folder / SUMS_NAME
        return sums.is_file() and sums.read_bytes() == (self.folder / SUMS_NAME).read_bytes()


def numbers(names: Iterable[str]) -> list[int]:
    """The numbers of those names that are a version's, in order."""
    return sorted(int(match[1]) for name in names if (match := _VERSION.fullmatch(name)))


def numbers_in(home: Path) -> list[int]:
    """The versions in a folder, none where it is not there yet; raises DamagedFile if it is no folder."""
    if home.is_symlink() or (home.exists() and not home.is_dir()):
        raise DamagedFile(f"{home} is no folder of versions (v1, v2, ...). Move it away and publish again.")
    return numbers(path.name for path in home.iterdir()) if home.is_dir() else []


def find_version(home: Path, name: str, folder: Path, files: tuple[FileEntry, ...]) -> tuple[Version, bool]:
    """The release in `folder` with the number that its content has in `home`, and whether it has it yet.

    Where it has none it is given the next one, which nothing reserves. Raises DamagedFile.
    """
    known = numbers_in(home)
    for number in known:
        found = Version(name, number, folder, files)
        if found.is_in(home / found.tag):
            return found, True
    return Version(name, max(known, default=0) + 1, folder, files), False


def number_release(home: Path, name: str, folder: Path, files: tuple[FileEntry, ...]) -> Version:
    """The release in `folder` with its number, by a link in `home`, which is made where there is none."""
    while True:
        version, is_there = find_version(home, name, folder, files)
        if not is_there:
            home.mkdir(parents=True, exist_ok=True)
            try:  # relative: the storage root may be moved
                (home / version.tag).symlink_to(os.path.relpath(folder, home))
            except FileExistsError:  # another process took the number meanwhile
                continue
            fsync_folder(home)
        move_latest(home)
        return version


def move_latest(home: Path) -> None:
    """Let `latest` lead to the newest version, at no moment nowhere; raises DamagedFile."""
    link = home / LATEST
    if link.exists() and not link.is_symlink():
        raise DamagedFile(f"{link} is no link of ours. Move it away and publish again.")
    # Looked at again behind each move: another process may have added a version meanwhile.
    while not link.is_symlink() or str(link.readlink()) != f"v{numbers_in(home)[-1]}":
        temporary = home / f".{LATEST}.{os.getpid()}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(f"v{numbers_in(home)[-1]}")
        temporary.replace(link)
        fsync_folder(home)


def other_content(version: Version, home: Path, found: str, taken: list[int]) -> BadInput:
    """Why a version, numbered by a link in `home`, cannot be published where `taken` are numbers already."""
    free = max([*taken, *numbers_in(home)]) + 1
    return BadInput(
        f"{found}. A version is never changed, and the newest one never goes back. To publish "
        f"{version.folder} under the next free number: mv {home / version.tag} {home / f'v{free}'}"
    )
