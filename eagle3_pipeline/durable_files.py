"""Files that survive kill -9 and power loss: atomic writes, checksums, free space.

A write is atomic: data in a temporary file, fsync, rename over the name, fsync of the folder.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import NotEnoughRoom

_CHUNK_BYTES = 1 << 20


def fsync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the content of a file, written by whatever library, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `path` such that any reader, at any time, sees the old content or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    payload = data.encode() if isinstance(data, str) else data
    try:
        with temporary.open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically as indented JSON."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sha256_of_file(path: Path) -> str:
    """Hex SHA-256 of a file's content, read in chunks of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """Put a file that is never written in place again at a second path, in place of what is there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
        fsync_file(target)


def require_free_bytes(
    folder: Path,
    wanted: int,
    purpose: str,
    way_out: str = "Free some space, or point EAGLE3_STORAGE to a larger disk.",
) -> None:
    """Raise NotEnoughRoom, ending with `way_out`, unless the disk of `folder` has `wanted` bytes free."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < wanted:
        raise NotEnoughRoom(
            f"{purpose} needs {wanted / 2**30:.1f} GiB on the disk of {existing}, {free / 2**30:.1f} GiB are "
            f"free. {way_out}"
        )


@contextmanager
def full_disk_named(folder: Path, way_out: str) -> Iterator[None]:
    """Turn the operating system's "no space left" into NotEnoughRoom with a way out."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NotEnoughRoom(f"the disk of {folder} is full ({error}). {way_out}") from error
