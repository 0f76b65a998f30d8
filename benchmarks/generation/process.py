"""One command as a process of its own, with what it used: seconds, CPU, and memory over time."""

import os
import resource
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_SAMPLE_S = 0.1


@dataclass(frozen=True)
class Usage:
    """What a command used, imports included. CPU is user and system, with that of its children."""

    seconds: float
    cpu_s: float
    memory: list[tuple[float, int]]
    """Resident bytes over the monotonic clock."""
    peak_private_bytes: int
    """Most resident bytes of all samples without mapped files, which are the disk's cache."""
    output: str
    """Its standard output."""

    @property
    def peak_bytes(self) -> int:
        """Most resident bytes of all samples."""
        return max(size for _, size in self.memory)

    def bytes_at(self, moment: float) -> int:
        """Resident bytes at a moment of the monotonic clock."""
        return min(self.memory, key=lambda one: abs(one[0] - moment))[1]


def run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> Usage:
    """Run a command in `folder`, with output.txt and log.txt there; raises RuntimeError when it fails.

    The CPU is that of all children that end meanwhile: nobody else may wait for one.
    """
    log = folder / "log.txt"
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    before = _cpu_of_children()
    began = time.monotonic()
    memory: list[tuple[float, int]] = []
    private = 0
    with (folder / "output.txt").open("w+") as output, log.open("w") as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={**os.environ, **paths, **(environment or {})},
        )
        try:
            watched = psutil.Process(process.pid)
            while process.poll() is None:
                resident = watched.memory_info()
                memory.append((time.monotonic(), resident.rss))
                private = max(private, resident.rss - resident.shared)
                time.sleep(_SAMPLE_S)
        except psutil.NoSuchProcess:
            process.wait()
        finally:
            process.kill()
            process.wait()
        seconds, cpu_s = time.monotonic() - began, _cpu_of_children() - before
        output.seek(0)
        said = output.read()
    if process.returncode != 0:
        raise RuntimeError(
            f"{command} ended with {process.returncode}:\n{said[-500:]}\n{log.read_text()[-3000:]}"
        )
    return Usage(seconds, cpu_s, memory, private, said)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
