"""Driver and GPUs of this machine, as NVML tells them."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from eagle3_pipeline.doctor.finding import Finding, ok, problem
from eagle3_pipeline.serving import nvml

_DRIVER = Path("/proc/driver/nvidia/version")


def gpus() -> Iterator[Finding]:
    """One line for the driver and one per GPU; a machine without any is as good as another."""
    answers = nvml.nvml()
    if answers is None:
        yield _without_nvml()
        return
    found = answers.gpus()
    yield ok(f"driver {answers.driver()}, {sum(gpu.parent is None for gpu in found)} GPUs")
    for gpu in found:
        yield ok(f"{gpu}: {gpu.free_bytes / 2**30:.1f} of {gpu.total_bytes / 2**30:.1f} GiB free")


def _without_nvml() -> Finding:
    if not _DRIVER.exists():
        return ok("no NVIDIA driver: servers and training can only run on the CPU")
    if importlib.util.find_spec("pynvml") is None:
        return problem(
            "an NVIDIA driver is loaded, but this Python has no bindings for NVML: nobody can tell who holds "
            "the memory of a GPU",
            "Install nvidia-ml-py into the environment of eagle3.",
        )
    return problem(
        "an NVIDIA driver is loaded, but NVML does not answer",
        "Look at `nvidia-smi`; a container must be started with `--gpus all`.",
    )
