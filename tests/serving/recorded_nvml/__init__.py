"""Answers of NVML as its Python bindings give them, invented but in the real structures, and their replay.

Memory is in bytes, a process is [pid, bytes or null], and {"error": code} stands for an NVMLError.

    eight-h200     a server on GPUs 0 and 1, somebody's training and a screen on 2; the rest is free
    split-h200     GPU 0 is split (MIG) into two slices, numbered with gaps; what a process uses is not told
    container      memory in use, but no process is listed on one GPU, and one of the host on the other
    one-lost       GPU 1 fell off the bus
    shared-memory  a GPU that has no memory of its own
"""

# ruff: noqa: N802 - the names are those of pynvml

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

from eagle3_pipeline.serving.nvml import Gpu, _Driver


class RecordedBindings:
    """Stands where the module `pynvml` stands."""

    def __init__(self, name: str, *, as_bytes: bool = False) -> None:
        self._machine = json.loads(Path(__file__).with_name(f"{name}.json").read_text())
        self._as_bytes = as_bytes
        self.open = 0
        self.at_init: int | None = None
        """An error code with which nvmlInit fails."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("NVML"):
            raise AttributeError(name)
        return getattr(pynvml, name)  # the errors

    def nvmlInit(self) -> None:
        if self.at_init is not None:
            raise pynvml.NVMLError(self.at_init)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        return self._text(self._machine["driver"])

    def nvmlDeviceGetCount(self) -> int:
        assert self.open == 1
        return len(self._machine["gpus"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return _answer(self._machine["gpus"][index])

    def nvmlDeviceGetUUID(self, handle: Any) -> str | bytes:
        return self._text(handle["uuid"])

    def nvmlDeviceGetName(self, handle: Any) -> str | bytes:
        return self._text(handle["name"])

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(**_answer(handle["memory"]))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        return _processes(handle["compute"])

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]:
        return _processes(handle["graphics"])

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return len(_answer(handle["mig"]))

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, number: int) -> Any:
        return _answer(handle["mig"][number])

    def _text(self, value: str) -> str | bytes:
        return value.encode() if self._as_bytes else value


class Readings:
    """Gives one reading after the other; the last one again and again."""

    def __init__(self, *readings: tuple[Gpu, ...]) -> None:
        self.left = list(readings)

    def gpus(self) -> tuple[Gpu, ...]:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    def driver(self) -> str:
        return "580.105.08"


def recorded(name: str) -> tuple[Gpu, ...]:
    """The reading of a recording."""
    return _Driver(RecordedBindings(name)).gpus()


def _answer(value: Any) -> Any:
    if isinstance(value, dict) and "error" in value:
        raise pynvml.NVMLError(value["error"])
    return value


def _processes(value: Any) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in _answer(value)]
