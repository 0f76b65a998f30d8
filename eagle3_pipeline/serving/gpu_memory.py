"""Memory of GPUs: whether a stopped server's is back, and whether there is room for the next server.

NVML names who has memory by process id, and the ids are those of the host. So they are believed only where
this process has the host's ids too, and where each GPU with memory in use lists somebody. Elsewhere, in a
container as a rule, free bytes are all there is to go by.

Without NVML there is nothing to ask: a process that is gone counts as memory that is back, and vLLM itself
finds out whether there is room. Processes that are not of this pipeline are told of, and never ended.
"""

import logging
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from eagle3_pipeline.errors import Busy, ServerError, ServerRefused
from eagle3_pipeline.serving import nvml
from eagle3_pipeline.serving.nvml import Gpu, GpuProcess
from eagle3_pipeline.serving.process import describe, pid_namespace

logger = logging.getLogger(__name__)

# The kernel gives this number to the pid namespace of the host itself (PROC_PID_INIT_INO, linux/proc_ns.h).
_HOST_PIDS = "pid:[4026531836]"
_POLL_S = 0.5
_SETTLED_S = 1.0
# What the driver keeps for itself on a GPU that nobody uses; on an H200 it is 0.6 GiB.
_NOBODYS_BYTES = 2**30
# Above what readings of processes and of free bytes, which are not of one moment, differ by.
_SLACK_BYTES = 2**28
# A server may have ended by itself just now, and the driver is a little behind.
_ROOM_LIMIT_S = 10.0


def read_memory(gpus: tuple[str, ...]) -> tuple[Gpu, ...]:
    """The GPUs of these physical names as they are now; () for the CPU and without NVML.

    Never fails, for a server has to be stopped whatever NVML answers: that is logged.
    """
    try:
        asked = nvml.nvml() if gpus else None
        machine = asked.gpus() if asked is not None else ()
    except ServerRefused as error:
        logger.warning("memory of GPUs %s is not looked at: %s", ",".join(gpus), error)
        return ()
    return tuple(gpu for gpu in machine if gpu.uuid in gpus and gpu.total_bytes)


def wait_for_memory(
    before: tuple[Gpu, ...], ended: Collection[int], *, was_ready: bool, limit_s: float = 60
) -> None:
    """Return when the memory that the ended processes had on their GPUs is free again.

    `before` is what read_memory gave while they still ran, `ended` are their pids, and `was_ready` says
    whether their server had loaded: then it had memory on each of its GPUs.

    Where process ids are believed, memory is back when the GPU lists none of `ended`, and when what is in
    use beyond the memory of all listed processes has not grown: memory of a process that is listed no more
    would show there. Others may take what came free meanwhile.

    Where they are not, what came free since `before` counts as theirs. Memory is back when free bytes have
    not risen for a second, and when, after a server that was ready, each GPU either gave back 256 MiB
    (a worker's context alone is more) or has less than 1 GiB in use.

    Raises ServerError after `limit_s`, with what holds the memory.
    """
    if not before or not ended:
        return
    gpus = tuple(gpu.uuid for gpu in before)
    rule: _ByProcess | _ByFreeBytes = _ByFreeBytes(before, was_ready)
    if pids_are_told(before):
        rule = _ByProcess(before, ended)
    began = time.monotonic()
    while missing := rule.missing(now := read_memory(gpus)):
        waited = time.monotonic() - began
        if waited >= limit_s:
            raise ServerError(
                f"memory of a stopped server is not back after {waited:.0f} s: {'; '.join(missing)}. Look at "
                "`nvidia-smi` and `dmesg`; what a process that is gone still holds comes back when the "
                "administrator resets the GPU. Then start again."
            )
        time.sleep(_POLL_S)
    tell_strangers(now, ended)


def require_memory(gpus: tuple[str, ...], share: float, ours: Collection[int] = ()) -> None:
    """Raise Busy unless each physical GPU has `share` (0 to 1) of its memory free; tell who has the rest.

    vLLM itself asks for this, after half a minute of imports. Processes other than `ours` are logged in any
    case.
    """
    deadline = time.monotonic() + _ROOM_LIMIT_S
    while (short := _short(now := read_memory(gpus), share)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    tell_strangers(now, ours)
    if short:
        raise Busy(
            f"{'; '.join(_shortage(gpu, share) for gpu in short)}. Wait for the memory or end who has it "
            "(`nvidia-smi`), take another partition, or lower gpu_memory_utilization."
        )


def tell_strangers(now: Sequence[Gpu], ours: Collection[int] = ()) -> None:
    """Log each process on these GPUs that is neither of `ours` nor this one."""
    for gpu in now:
        for process in gpu.processes:
            if process.pid not in ours and process.pid != os.getpid():
                logger.warning("not of this pipeline and left alone: %s on %s", holder_in_words(process), gpu)


def holder_in_words(process: GpuProcess) -> str:
    """Who has how much memory on a GPU: pid, command where it can be seen from here, GiB where told."""
    if pid_namespace() == _HOST_PIDS:
        who = describe(process.pid)
    else:  # another process of the container may have that id here
        who = f"pid {process.pid} by NVML's count (of the host or of a container)"
    return f"{who} with {'memory' if process.used_bytes is None else _gib(process.used_bytes)}"


def pids_are_told(gpus: Sequence[Gpu]) -> bool:
    """Whether the process ids of a reading mean something here, and somebody is listed for memory in use."""
    return pid_namespace() == _HOST_PIDS and all(
        gpu.processes or gpu.used_bytes < _NOBODYS_BYTES for gpu in gpus
    )


@dataclass(frozen=True)
class _ByProcess:
    """What is missing, judged by the processes that NVML lists."""

    before: Sequence[Gpu]
    ended: Collection[int]

    def missing(self, now: Sequence[Gpu]) -> list[str]:
        found = []
        unlisted = {gpu.uuid: _unlisted_bytes(gpu) for gpu in self.before}
        for gpu in now:
            held = [process for process in gpu.processes if process.pid in self.ended]
            found += [f"{holder_in_words(process)} is still listed on {gpu}" for process in held]
            was, is_ = unlisted[gpu.uuid], _unlisted_bytes(gpu)
            if not held and was is not None and is_ is not None and is_ - was > _SLACK_BYTES:
                found.append(f"{_gib(is_ - was)} on {gpu} belong to no listed process")
        return found


def _unlisted_bytes(gpu: Gpu) -> int | None:
    """What is in use beyond the memory of the listed processes; None where theirs is not told."""
    listed = [process.used_bytes for process in gpu.processes]
    return None if None in listed else gpu.used_bytes - sum(filter(None, listed))


@dataclass
class _ByFreeBytes:
    """What is missing, judged by free bytes alone."""

    before: Sequence[Gpu]
    was_ready: bool
    _most_free: dict[str, int] = field(default_factory=dict)
    _risen_at: float = field(default_factory=time.monotonic)

    def missing(self, now: Sequence[Gpu]) -> list[str]:
        for gpu in now:
            if gpu.free_bytes > self._most_free.get(gpu.uuid, -1):
                self._most_free[gpu.uuid] = gpu.free_bytes
                self._risen_at = time.monotonic()
        if time.monotonic() - self._risen_at < _SETTLED_S:
            return ["memory is still coming back"]
        if not self.was_ready:
            return []
        free = {gpu.uuid: gpu.free_bytes for gpu in self.before}
        return [
            f"{_gib(gpu.used_bytes)} on {gpu} are in use, as much as before the stop ({_holders(gpu)})"
            for gpu in now
            if gpu.used_bytes >= _NOBODYS_BYTES and self._most_free[gpu.uuid] - free[gpu.uuid] < _SLACK_BYTES
        ]


def _short(gpus: Sequence[Gpu], share: float) -> list[Gpu]:
    return [gpu for gpu in gpus if gpu.free_bytes < share * gpu.total_bytes]


def _shortage(gpu: Gpu, share: float) -> str:
    return (
        f"{gpu} has {_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} free, but gpu_memory_utilization "
        f"{share:g} wants {_gib(share * gpu.total_bytes)}; the rest is held by {_holders(gpu)}"
    )


def _holders(gpu: Gpu) -> str:
    listed = ", ".join(map(holder_in_words, gpu.processes))
    return listed or "nobody whom NVML lists here (a process of another container, perhaps)"


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
