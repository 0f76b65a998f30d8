"""The host-local folder of leases and server records, shared by all users and storage roots.

    $EAGLE3_HOST_STATE (default /tmp/eagle3-pipeline), mode 1777
        leases/    <gpu>.lock  <gpu>.guard  <gpu>.holders  start-<fingerprint>.lock
        servers/   <served name>-<uid>.json  <served name>-<uid>.<marker>.life

Lock files are never deleted: a process may hold the deleted one while another locks a new one. The folders
are writable for everybody, and sticky: so nothing in them is followed if it is a link, and a record is only
believed to be of the user who owns its file (record.py).
"""

import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from eagle3_pipeline.errors import BadInput

STATE_VARIABLE = "EAGLE3_HOST_STATE"
_DEFAULT = Path("/tmp/eagle3-pipeline")


def state_root(environment: Mapping[str, str] = os.environ) -> Path:
    """The host state of a process with this environment, whether it was ever used or not."""
    return Path(environment.get(STATE_VARIABLE) or _DEFAULT)


def state_folder(kind: str) -> Path:
    """The folder `kind` of the host state, made when missing, writable for everybody; raises BadInput."""
    root = state_root()
    for folder in (root, root / kind):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise BadInput(
                    f"{folder} is a link or a file, expected the folder of leases and servers: whoever made "
                    f"it could lead them astray. Remove it, or set {STATE_VARIABLE} to another folder."
                ) from None
            continue
        folder.chmod(0o1777)
    return root / kind


def open_shared(path: Path, flags: int) -> int:
    """A descriptor of `path`, which is made when missing and never a link; `flags` are O_RDONLY or O_RDWR.

    Never O_CREAT on a file that exists: in a sticky folder the kernel (fs.protected_regular) refuses that
    for files of other users, even readable ones.
    """
    while True:
        try:
            return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            pass
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        os.fchmod(descriptor, 0o666)
        return descriptor


def is_locked(path: Path) -> bool:
    """Whether any process, this one included, holds the lock on a file; a file that is missing is free."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
