"""A version of a release in the folder that the recipe names.

<release.folder>/<name>/
    v1/  v2/          whole, or not there: written as .v2.tmp, which the next call takes away after a kill
    latest -> v2
"""

import shutil
from pathlib import Path

from eagle3_pipeline.durable_files import (
    fsync_file,
    fsync_folder,
    full_disk_named,
    require_free_bytes,
    sha256_of_file,
)
from eagle3_pipeline.errors import DamagedFile
from eagle3_pipeline.release.versions import Version, move_latest, numbers_in, other_content
from eagle3_pipeline.sole_writer import sole_writer

_ROOM = "Free some space there, or name another release.folder; then publish again."


def copy_version(version: Version, home: Path, root: Path) -> Path:
    """Copy a version, numbered in `home`, to `root`; returns its folder, at once where it is there.

    Raises BadInput (other content has its number there), DamagedFile (what is written is not what was read),
    NotEnoughRoom and Busy.
    """
    target = root / version.name / version.tag
    if not _is_there(version, home, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        taken = f"{target.parent} is being published to by another process"
        with full_disk_named(target.parent, _ROOM), sole_writer(target.parent / ".lock", taken):
            if not _is_there(version, home, target):
                _write(version, target)
    move_latest(target.parent)
    return target


def plan_of_copy(version: Version, home: Path, root: Path) -> str:
    """What `copy_version` would do, in a line; raises BadInput as it would."""
    target = root / version.name / version.tag
    if _is_there(version, home, target):
        return f"{target}: is there"
    return f"{target}: a copy of {len(version.files)} files, {version.bytes / 1e6:.1f} MB"


def _is_there(version: Version, home: Path, target: Path) -> bool:
    if version.number not in numbers_in(target.parent):
        return False
    if not version.is_in(target):
        raise other_content(version, home, f"{target} is another release", numbers_in(target.parent))
    return True


def _write(version: Version, target: Path) -> None:
    partial = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    require_free_bytes(target.parent, version.bytes, f"a copy of {version.name} {version.tag}", _ROOM)
    try:
        for entry in version.files:
            path = partial / entry.path
            path.parent.mkdir(parents=True, exist_ok=True)
            # No hard link: whoever edits the copy would edit the release with it.
            shutil.copyfile(version.folder / entry.path, path)
            fsync_file(path)
            if sha256_of_file(path) != entry.sha256:
                raise DamagedFile(
                    f"{path} is not what was copied from {version.folder}. Check both disks, then publish "
                    "again."
                )
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for folder in {partial, *(path for path in partial.rglob("*") if path.is_dir())}:
        fsync_folder(folder)
    partial.rename(target)
    fsync_folder(target.parent)
