"""Memory of the machine that a process may still take, the limit of its container included."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
# Of memory.stat: what counts as used, and is given back when it is wanted. Pages of files, and the kernel's
# knowledge of files.
_GIVEN_BACK = ("inactive_file", "active_file", "slab_reclaimable")


def available_bytes() -> int:
    """What the machine has left, or the limit of the control group where that is less."""
    return min(int(psutil.virtual_memory().available), _free_in_group())


def _free_in_group() -> int:
    """What the limit of a container leaves; no limit is a very large one."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:  # another system, or the first version of control groups
        return 1 << 62
    statistics = dict(line.split() for line in lines)
    given_back = sum(int(statistics.get(name, 0)) for name in _GIVEN_BACK)
    return (1 << 62) if limit == "max" else int(limit) - used + given_back
