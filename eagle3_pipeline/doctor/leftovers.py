"""What servers left behind that are gone: records, processes, shared memory, folders.

What may belong to somebody whose processes cannot be seen is not judged: shared memory and folders count only
where they are this user's.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from eagle3_pipeline.doctor.finding import Finding, note, ok, problem
from eagle3_pipeline.doctor.records import records
from eagle3_pipeline.serving.host_state import STATE_VARIABLE, state_root
from eagle3_pipeline.serving.process import MARKER_VARIABLE, find_family, pid_namespace
from eagle3_pipeline.serving.record import ServerRecord

_SHARED_MEMORY = Path("/dev/shm")
_TEMPORARY = Path("/tmp")
# What Python's multiprocessing, and with it vLLM, calls its segments and semaphores.
_SEGMENTS = ("psm_*", "sem.mp-*", "vllm_dist_*")


def leftovers() -> Iterator[Finding]:
    """A line per thing left behind, or one that there is none."""
    found = [*_dead_records(), *_unknown_servers(), *_shared_memory(), *_folders()]
    yield from found or [ok("leftovers: none (records, processes, shared memory, folders of servers)")]


def dead_records() -> list[ServerRecord]:
    """Records of servers that are gone, of this container."""
    return [one for one in records() if not one.foreign and one.state() == "failed"]


def _dead_records() -> Iterator[Finding]:
    for record in dead_records():
        left = find_family(record.process, record.marker)
        if left:
            yield problem(
                f"{record} is dead, but its processes {[one.pid for one in left]} run on",
                "Its watcher or the next step on its GPUs ends them; `eagle3 doctor --repair` does it now.",
            )
        else:
            why = f" ({record.reason.splitlines()[0]})" if record.reason else ""
            yield note(
                f"{record} is dead{why}",
                "Nothing has to be done: the next step on its GPUs forgets it, as `eagle3 server stop` does.",
            )


def _unknown_servers() -> Iterator[Finding]:
    for marker, members in unrecorded().items():
        pids = ", ".join(str(pid) for pid in members)
        if elsewhere := elsewhere_recorded(members):
            yield note(
                f"processes {pids} are of a server that is recorded in {' and '.join(sorted(elsewhere))}",
                f"{STATE_VARIABLE} should be the same for all users and recipes of a machine.",
            )
        else:
            yield problem(
                f"processes {pids} are of a server (mark {marker[:12]}) of which there is no record",
                "No step will find them. `eagle3 doctor --repair` ends them.",
            )


def unrecorded() -> dict[str, dict[int, str]]:
    """Processes that carry the mark of a server of which there is no record: marker -> pid -> host state."""
    recorded = {record.marker for record in records()}
    return {marker: members for marker, members in _marked().items() if marker not in recorded}


def elsewhere_recorded(members: dict[int, str]) -> set[str]:
    """Other host states than ours where the server of these processes may have its record."""
    return {state for state in members.values() if state != str(state_root())}


def _marked() -> dict[str, dict[int, str]]:
    """Marker -> pid -> host state, of all processes that carry a server's mark and can be looked into.

    Those of a container, which its host sees, are left out: their records lie in the container.
    """
    found: dict[str, dict[int, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str((folder / "ns" / "pid").readlink()) != pid_namespace():
                continue
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        environment = dict(entry.partition("=")[::2] for entry in entries)
        if marker := environment.get(MARKER_VARIABLE):
            state = str(state_root(environment))
            found.setdefault(marker, {})[int(folder.name)] = state
    return found


def _shared_memory() -> Iterator[Finding]:
    """Segments of this user that no process has mapped."""
    found = [path for pattern in _SEGMENTS for path in sorted(_SHARED_MEMORY.glob(pattern))]
    mapped = _mapped() if found else ""
    left = [path for path in found if _is_mine(path) and str(path) not in mapped]
    if left:
        size = sum(path.stat().st_size for path in left if path.exists())
        yield note(
            f"{len(left)} segments of shared memory ({size / 2**20:,.0f} MiB) that no process uses: "
            f"{', '.join(path.name for path in left[:3])}{' ...' if len(left) > 3 else ''}",
            f"Unless a container shares {_SHARED_MEMORY}, remove them: `rm {left[0]}` and so on.",
        )


def _mapped() -> str:
    texts = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            texts.append(maps.read_text(errors="replace"))
        except OSError:  # it ended, or is another user's, whose segments are not looked at
            continue
    return "".join(texts)


def folders_left() -> list[Path]:
    """Folders of sockets of servers that are gone, of this user."""
    known = {marker[:12] for marker in (*_marked(), *(record.marker for record in records()))}
    prefix = "eagle3-ipc-"
    found = sorted(_TEMPORARY.glob(f"{prefix}*"))
    return [one for one in found if one.name.removeprefix(prefix) not in known and _is_mine(one)]


def _folders() -> Iterator[Finding]:
    if left := folders_left():
        names = ", ".join(map(str, left))
        yield note(
            f"{len(left)} folders of servers that are gone: {names}", "`eagle3 doctor --repair` removes them."
        )


def _is_mine(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False
