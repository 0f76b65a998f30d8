"""Who holds a lease, for people and for those who may share it: one small JSON file per lease.

    {"fingerprint": ..., "holders": [{"pid", "namespace", "purpose", "since"}, ...]}

The lock decides who holds a lease (lease.py); this file only says who that is. It is written under the
lease's guard. A killed holder's line stays in it until somebody takes the lease, and is left out in reading.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import psutil

from eagle3_pipeline.serving.host_state import open_shared, state_folder
from eagle3_pipeline.serving.process import pid_namespace


@dataclass(frozen=True)
class Holder:
    """One process that holds a lease."""

    lease: str
    """`gpu-<name>` or `cpu`."""
    pid: int
    namespace: str
    """The pid namespace (container) in which `pid` means something."""
    purpose: str
    since: float
    """Seconds since the epoch."""

    @classmethod
    def this_process(cls, lease: str, purpose: str) -> Self:
        """The holder that this process becomes now."""
        return cls(lease, os.getpid(), pid_namespace(), purpose, time.time())

    @property
    def here(self) -> bool:
        """Whether it runs in this pid namespace."""
        return self.namespace == pid_namespace()

    def may_live(self) -> bool:
        """False for one that was killed; one of another container cannot be looked up."""
        return not self.here or psutil.pid_exists(self.pid)

    def __str__(self) -> str:
        where = "" if self.here else " of another container"
        return f"{self.purpose} (pid {self.pid}{where}, for {time.time() - self.since:.0f} s)"


@dataclass(frozen=True)
class Holders:
    """What the file of a lease says. With a fingerprint the lease is shared among that server's users."""

    fingerprint: str | None = None
    holders: list[Holder] = field(default_factory=list)


def lease_path(name: str, kind: str) -> Path:
    """The file of a lease; `kind` is lock, guard or holders."""
    return state_folder("leases") / f"{name}.{kind}"


def read_holders(name: str) -> Holders:
    """Who holds a lease that is held; nobody when the file is torn by a kill: such a lease is not shared."""
    try:
        value = json.loads(lease_path(name, "holders").read_text())
        found = [Holder(**{**one, "lease": name}) for one in value["holders"]]
        return Holders(value["fingerprint"], [holder for holder in found if holder.may_live()])
    except (OSError, ValueError, KeyError, TypeError):
        return Holders()


def write_holders(name: str, fingerprint: str | None, holders: list[Holder]) -> None:
    """Say who holds a lease. In place, for a file of another user cannot be replaced in a sticky folder."""
    value = {"fingerprint": fingerprint, "holders": [asdict(holder) for holder in holders]}
    descriptor = open_shared(lease_path(name, "holders"), os.O_RDWR)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(value).encode())
    finally:
        os.close(descriptor)
