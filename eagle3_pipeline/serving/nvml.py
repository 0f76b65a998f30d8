"""What the driver tells about the GPUs, through NVML: one plain reading of all, with who has memory on them.

NVML counts as `nvidia-smi` does and knows nothing of CUDA_VISIBLE_DEVICES. A GPU that is split (MIG) is
followed by its slices. Process ids are those of the host: in a container they mean nothing, or none are told.

NVML is opened for each reading alone: a process that keeps it open stands in the way of a reset of the GPU.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from eagle3_pipeline.errors import ServerRefused

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuProcess:
    """A process that has memory on a GPU."""

    pid: int
    used_bytes: int | None
    """None where the driver does not tell, as in containers and for slices."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one slice of a GPU, at one moment."""

    index: int
    """As `nvidia-smi` counts; of a slice, that of its GPU."""
    uuid: str
    """`GPU-...`, of a slice `MIG-...`."""
    name: str
    total_bytes: int
    """0 where the driver does not tell, as on machines whose GPU shares the memory of the CPU."""
    free_bytes: int
    processes: tuple[GpuProcess, ...]
    parent: str | None = None
    """Of a slice, the UUID of its GPU."""

    @property
    def used_bytes(self) -> int:
        """What processes and the driver itself have taken."""
        return self.total_bytes - self.free_bytes

    def __str__(self) -> str:
        return f"{'GPU' if self.parent is None else 'a slice of GPU'} {self.index} ({self.name}, {self.uuid})"


class Nvml(Protocol):
    """What this project asks the driver; tests replay recorded answers."""

    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs with their slices, as they are now. Raises ServerRefused."""

    def driver(self) -> str:
        """The driver's version. Raises ServerRefused."""


def nvml() -> Nvml | None:
    """The way to ask the driver; None without NVIDIA's driver (or its bindings).

    Raises ServerRefused when there is a driver and it cannot be asked: CUDA would not work either, and
    another name for the same GPU, as it has without NVML, would be another lease.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        raise _refusal(error) from error
    return _Driver(pynvml)


def _refusal(error: Exception) -> ServerRefused:
    return ServerRefused(
        f'the GPU driver cannot be asked: NVML answers "{error}". vLLM cannot do without it either. '
        "Look at `nvidia-smi` and `dmesg`; after an update of the driver the machine has to be restarted."
    )


class _Driver:
    """NVML through its Python bindings, which are untyped: their module is given."""

    def __init__(self, bindings: Any) -> None:
        self._nvml = bindings
        # A driver without such a thing, one too old for the call, or one that does not tell everybody.
        self._silence = (
            bindings.NVMLError_NotSupported,
            bindings.NVMLError_NoPermission,
            bindings.NVMLError_FunctionNotFound,
            bindings.NVMLLibraryMismatchError,
        )

    def gpus(self) -> tuple[Gpu, ...]:
        with self._open():
            count = self._nvml.nvmlDeviceGetCount()
            return tuple(gpu for index in range(count) for gpu in self._readable(index))

    def driver(self) -> str:
        with self._open():
            return _text(self._nvml.nvmlSystemGetDriverVersion())

    @contextmanager
    def _open(self) -> Iterator[None]:
        try:
            self._nvml.nvmlInit()
            try:
                yield
            finally:
                self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            raise _refusal(error) from error

    def _readable(self, index: int) -> list[Gpu]:
        """A GPU and its slices; none of it when it is broken, for the others are not."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = self._read(handle, index, None)
            return [gpu, *(self._read(slice_, index, gpu.uuid) for slice_ in self._slices(handle))]
        except self._nvml.NVMLError as error:
            logger.warning(
                'GPU %d is left out, for NVML answers "%s". Look at `nvidia-smi` and `dmesg`.', index, error
            )
            return []

    def _slices(self, handle: Any) -> Iterator[Any]:
        try:
            count = self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except self._silence:
            return
        for number in range(count):
            try:
                found = self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            except (self._nvml.NVMLError_NotFound, *self._silence):
                continue  # slices are not numbered without gaps
            yield found

    def _read(self, handle: Any, index: int, parent: str | None) -> Gpu:
        total, free = self._memory(handle)
        return Gpu(
            index=index,
            uuid=_text(self._nvml.nvmlDeviceGetUUID(handle)),
            name=_text(self._nvml.nvmlDeviceGetName(handle)),
            total_bytes=total,
            free_bytes=free,
            processes=self._processes(handle),
            parent=parent,
        )

    def _memory(self, handle: Any) -> tuple[int, int]:
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._silence:
            return 0, 0
        return int(memory.total), int(memory.free)

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...]:
        """Each process once: a desktop's is listed as one that draws and one that computes."""
        found: dict[int, int | None] = {}
        for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            try:
                listed = getattr(self._nvml, name)(handle)
            except self._silence:
                continue
            for process in listed:
                used = process.usedGpuMemory  # None where it is not told
                found.setdefault(int(process.pid), None if used is None else int(used))
        return tuple(GpuProcess(pid, used) for pid, used in sorted(found.items()))


def _text(answer: str | bytes) -> str:
    """Bindings before version 11.515 answer in bytes."""
    return answer.decode() if isinstance(answer, bytes) else answer
