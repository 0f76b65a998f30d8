"""GPUs by their physical names: the outer CUDA_VISIBLE_DEVICES, and whether memory is back.

A recipe counts GPUs within an outer CUDA_VISIBLE_DEVICES, as every CUDA program does. Leases and records
are of the host, so they carry the names that lie behind it:

    outer "2,3",  recipe ("0", "1")  ->  ("2", "3")
    outer unset,  recipe ("0", "1")  ->  ("0", "1")
    any outer,    recipe ("GPU-5f..",)  ->  ("GPU-5f..",)
"""

import logging
import os
import time
from collections.abc import Collection

from eagle3_pipeline.errors import RecipeError

logger = logging.getLogger(__name__)

MASK_VARIABLE = "CUDA_VISIBLE_DEVICES"


def physical_gpus(names: tuple[str, ...]) -> tuple[str, ...]:
    """The physical names of a partition's GPUs, in its order; () is the CPU. Raises RecipeError."""
    mask = os.environ.get(MASK_VARIABLE)
    if not names or mask is None:
        return names
    visible = [entry.strip() for entry in mask.split(",") if entry.strip()]
    if not visible or visible == ["-1"]:
        raise RecipeError(
            f"{MASK_VARIABLE} is {mask!r}, which hides every GPU, but the partition wants {list(names)}. "
            "Unset it, or set the partition to cpu."
        )
    return tuple(_behind_mask(name, visible) for name in names)


def _behind_mask(name: str, visible: list[str]) -> str:
    if not name.isdigit():
        return name
    if int(name) >= len(visible):
        raise RecipeError(
            f"GPU {name} of the partition does not exist: {MASK_VARIABLE} shows {len(visible)} "
            f"({','.join(visible)}), so the recipe may use 0 to {len(visible) - 1}."
        )
    return visible[int(name)]


def wait_for_memory(gpus: tuple[str, ...], ended: Collection[int], limit_s: float = 60) -> None:
    """Return when the driver lists none of the processes `ended` on the GPUs any more.

    The driver frees memory a little after a process is gone. Without the NVML bindings there is nothing to
    ask, and a process that is gone counts as memory that is back.
    """
    if not gpus or not ended:
        return
    try:
        import pynvml
    except ImportError:
        return
    pynvml.nvmlInit()
    try:
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        handles = [by_index(int(gpu)) if gpu.isdigit() else by_uuid(gpu) for gpu in gpus]
        deadline = time.monotonic() + limit_s
        while listed := _listed(pynvml, handles) & set(ended):
            if time.monotonic() > deadline:
                logger.warning("GPUs %s still list the ended processes %s", ",".join(gpus), sorted(listed))
                return
            time.sleep(0.2)
    finally:
        pynvml.nvmlShutdown()


def _listed(pynvml: object, handles: list[object]) -> set[int]:
    ask = pynvml.nvmlDeviceGetComputeRunningProcesses  # type: ignore[attr-defined]
    return {process.pid for handle in handles for process in ask(handle)}
