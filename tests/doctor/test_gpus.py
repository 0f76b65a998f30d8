"""GPUs and the memory of partitions, with NVML replaced by recorded answers."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from eagle3_pipeline.doctor import Mark, gpus, partitions
from eagle3_pipeline.serving import gpu_memory, nvml
from eagle3_pipeline.serving.lease import hold_lease
from eagle3_pipeline.serving.nvml import Gpu, GpuProcess
from tests.doctor.conftest import LineageMaker
from tests.records import process_of_a_server, write_record

GIB = 2**30
H200 = Gpu(0, "GPU-5f4b", "NVIDIA H200", 143_771 * 2**20, 143_167 * 2**20, ())
ON_GPU = dict.fromkeys(("generation", "extraction", "training", "evaluation"), "0")


@dataclass
class Recorded:
    found: tuple[Gpu, ...]

    def gpus(self) -> tuple[Gpu, ...]:
        return self.found

    def driver(self) -> str:
        return "580.65.06"


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch):
    """Let the driver show these GPUs, with the process ids of this very pid namespace."""
    monkeypatch.setattr(gpu_memory, "_HOST_PIDS", str(Path("/proc/self/ns/pid").readlink()))

    def set_answer(*found: Gpu) -> None:
        monkeypatch.setattr(nvml, "nvml", lambda: Recorded(found))

    return set_answer


def test_each_gpu_is_shown_with_its_free_memory_and_the_driver_with_its_version(show) -> None:
    show(H200, replace(H200, index=1, uuid="GPU-77aa"))
    found = list(gpus.gpus())
    assert found[0].what == "driver 580.65.06, 2 GPUs"
    assert found[1].what == "GPU 0 (NVIDIA H200, GPU-5f4b): 139.8 of 140.4 GiB free"
    assert {one.mark for one in found} == {Mark.OK}


def test_no_driver_is_no_problem_where_the_recipe_wants_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nvml, "nvml", lambda: None)
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "none")
    (found,) = gpus.gpus()
    assert (found.mark, "only run on the CPU" in found.what) == (Mark.OK, True)


def test_a_driver_that_nvml_cannot_ask_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvml, "nvml", lambda: None)
    (tmp_path / "version").touch()
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "version")
    for spec, words in ((None, "no bindings for NVML"), (object(), "NVML does not answer")):
        monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda _, spec=spec: spec)
        (found,) = gpus.gpus()
        assert found.mark == Mark.PROBLEM
        assert words in found.what
        assert found.advice


def test_a_partition_with_its_memory_free_is_fine(show, make_lineage: LineageMaker) -> None:
    show(H200)
    lineage = make_lineage(partitions=ON_GPU, server={"common": {"gpu_memory_utilization": 0.9}})
    (found,) = partitions.partitions(lineage)
    assert found.mark == Mark.OK
    assert found.what == (
        "GPU 0 (NVIDIA H200, GPU-5f4b) for generation, extraction, training, evaluation: 139.8 of 140.4 GiB "
        "free, gpu_memory_utilization 0.9 wants 126.4"
    )


def test_memory_that_a_stranger_holds_is_a_problem_and_the_stranger_is_named_with_its_command(
    show, make_lineage: LineageMaker
) -> None:
    with process_of_a_server() as stranger:
        taken = (GpuProcess(stranger.pid, 60 * GIB),)
        show(replace(H200, free_bytes=80 * GIB, processes=taken))
        who, memory = partitions.partitions(make_lineage(partitions=ON_GPU))
        assert who.mark == Mark.NOTE
        assert f"pid {stranger.pid} (/bin/sleep 600) with 60.0 GiB is not of this pipeline" in who.what
        assert memory.mark == Mark.OK  # 0.1 of the memory is wanted
        wants = {"common": {"gpu_memory_utilization": 0.9}}
        _, memory = partitions.partitions(make_lineage(partitions=ON_GPU, server=wants))
        assert memory.mark == Mark.PROBLEM
        assert "lower gpu_memory_utilization" in memory.advice


def test_memory_of_our_own_servers_and_steps_is_no_problem(show, make_lineage: LineageMaker) -> None:
    lineage = make_lineage(partitions=ON_GPU, server={"common": {"gpu_memory_utilization": 0.9}})
    with process_of_a_server("ab" * 16) as process:
        show(replace(H200, free_bytes=GIB, processes=(GpuProcess(process.pid, None),)))
        record = write_record(process, marker="ab" * 16, gpus=(H200.uuid,))
        (found,) = partitions.partitions(lineage)
        assert (found.mark, "this pipeline works there" in found.what) == (Mark.OK, True)
        record.remove()
    show(replace(H200, free_bytes=GIB, processes=(GpuProcess(os.getpid(), None),)))
    with hold_lease((H200.uuid,), None, "training of tiny"):
        (found,) = partitions.partitions(lineage)
        assert found.mark == Mark.OK


def test_gpus_that_nobody_shows_are_a_problem(make_lineage: LineageMaker, monkeypatch) -> None:
    monkeypatch.setattr(nvml, "nvml", lambda: None)
    (found,) = partitions.partitions(make_lineage(partitions=ON_GPU))
    assert found.mark == Mark.PROBLEM
    assert "GPU 0, wanted for generation, extraction, training, evaluation" in found.what
