import logging
import os
from dataclasses import replace

import pytest

from eagle3_pipeline.errors import Busy, ServerError, ServerRefused
from eagle3_pipeline.serving import gpu_memory, nvml
from eagle3_pipeline.serving.gpu_memory import read_memory, require_memory, wait_for_memory
from eagle3_pipeline.serving.nvml import Gpu, GpuProcess
from tests.serving.recorded_nvml import Readings, recorded

GIB = 2**30
RUNNING = recorded("eight-h200")[:2]
STRANGERS = recorded("eight-h200")[2]
IDLE = recorded("eight-h200")[3]
CONTAINER = recorded("container")
SLICE = recorded("split-h200")[1]
OURS = [3941201, 3941202]


@pytest.fixture(autouse=True)
def fast_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "_POLL_S", 0.01)
    monkeypatch.setattr(gpu_memory, "_SETTLED_S", 0.05)
    monkeypatch.setattr(gpu_memory, "_ROOM_LIMIT_S", 0.1)
    monkeypatch.setattr(gpu_memory, "pid_namespace", lambda: gpu_memory._HOST_PIDS)
    monkeypatch.setattr(gpu_memory, "describe", lambda pid: f"pid {pid} (python train.py)")


def set_readings(monkeypatch: pytest.MonkeyPatch, *readings: tuple[Gpu, ...]) -> Readings:
    replay = Readings(*readings)
    monkeypatch.setattr(nvml, "nvml", lambda: replay)
    return replay


def enter_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "pid_namespace", lambda: "pid:[4026532840]")


def freed(gpu: Gpu, count: float, *processes: GpuProcess) -> Gpu:
    return replace(gpu, free_bytes=gpu.free_bytes + int(count), processes=processes)


def emptied(*gpus: Gpu) -> tuple[Gpu, ...]:
    return tuple(replace(gpu, free_bytes=IDLE.free_bytes, processes=()) for gpu in gpus)


def test_the_partitions_gpus_alone_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    set_readings(monkeypatch, recorded("eight-h200"))
    assert read_memory((RUNNING[1].uuid, IDLE.uuid)) == (RUNNING[1], IDLE)
    assert read_memory(()) == ()
    set_readings(monkeypatch, recorded("shared-memory"))
    assert read_memory((recorded("shared-memory")[0].uuid,)) == ()
    monkeypatch.setattr(nvml, "nvml", lambda: None)
    assert read_memory(("0",)) == ()


def test_a_driver_that_cannot_be_asked_does_not_stand_in_the_way_of_a_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ServerRefused("no answer")

    monkeypatch.setattr(nvml, "nvml", fail)
    assert read_memory(("GPU-1", "GPU-2")) == ()
    assert "memory of GPUs GPU-1,GPU-2 is not looked at: no answer" in caplog.text
    wait_for_memory((), [7], was_ready=True)


def test_memory_is_back_when_no_ended_process_is_listed_and_what_they_held_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_left = (freed(RUNNING[0], 125 * GIB), RUNNING[1])
    gone_from_the_list = (freed(RUNNING[0], 100 * GIB), freed(RUNNING[1], 0))
    replay = set_readings(monkeypatch, RUNNING, one_left, gone_from_the_list, emptied(*RUNNING))
    wait_for_memory(RUNNING, OURS, was_ready=True)
    assert replay.left == [emptied(*RUNNING)]


def test_a_process_that_the_driver_still_lists_is_named_with_what_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_readings(monkeypatch, (*emptied(RUNNING[0]), RUNNING[1]))
    words = (
        r"not back after 0 s: pid 3941202 \(python train.py\) with 125\.9 GiB is still listed on GPU 1 "
        r"\(NVIDIA H200, GPU-9a.*\)\. Look at `nvidia-smi`.*resets the GPU"
    )
    with pytest.raises(ServerError, match=words):
        wait_for_memory(RUNNING, OURS, was_ready=True, limit_s=0.05)


def test_memory_that_belongs_to_nobody_any_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_readings(monkeypatch, (freed(RUNNING[0], 100 * GIB),))
    words = r"25\.9 GiB on GPU 0 .* belong to no listed process"
    with pytest.raises(ServerError, match=words):
        wait_for_memory(RUNNING[:1], OURS, was_ready=True, limit_s=0.05)


def test_a_stranger_that_took_the_memory_meanwhile_is_told_of_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "eagle3_pipeline")
    stranger = GpuProcess(os.getppid(), int(60.5 * GIB))
    me = GpuProcess(os.getpid(), GIB)
    used = STRANGERS.used_bytes - IDLE.used_bytes
    (empty,) = emptied(RUNNING[0])
    taken = freed(empty, -61.5 * GIB, stranger, me)
    set_readings(monkeypatch, (taken, freed(STRANGERS, -GIB, GpuProcess(3917730, used + GIB))))
    wait_for_memory((RUNNING[0], STRANGERS), OURS, was_ready=True)
    told = [record.message for record in caplog.records]
    assert len(told) == 2
    assert f"left alone: pid {os.getppid()} (python train.py) with 60.5 GiB on GPU 0 (NVIDIA H200" in told[0]
    assert "pid 3917730 (python train.py) with 97.0 GiB on GPU 2" in told[1]


def test_where_used_memory_is_not_told_the_list_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = set_readings(monkeypatch, (SLICE,), (SLICE,), (freed(SLICE, 50 * GIB),))
    wait_for_memory((SLICE,), OURS, was_ready=True)
    assert len(replay.left) == 1
    set_readings(monkeypatch, (SLICE,))
    with pytest.raises(ServerError, match=r"3941201 .* with memory is still listed on a slice of GPU 0"):
        wait_for_memory((SLICE,), OURS, was_ready=True, limit_s=0.05)


def test_in_a_container_memory_is_back_when_free_bytes_have_risen_and_rise_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enter_container(monkeypatch)
    half = tuple(freed(gpu, 60 * GIB) for gpu in CONTAINER)
    replay = set_readings(monkeypatch, CONTAINER, half, emptied(*CONTAINER))
    wait_for_memory(CONTAINER, [3917344], was_ready=True)
    assert len(replay.left) == 1


@pytest.mark.parametrize("in_container", [True, False])
def test_in_a_container_nothing_that_came_back_is_a_failure_that_names_whom_nvml_names(
    in_container: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_container:
        enter_container(monkeypatch)
    # Elsewhere too, where a GPU in use lists nobody.
    set_readings(monkeypatch, (CONTAINER[0], *emptied(CONTAINER[1])))
    words = r"126\.5 GiB on GPU 0 .* are in use, as much as before the stop \(nobody whom NVML lists here"
    with pytest.raises(ServerError, match=words) as caught:
        wait_for_memory(CONTAINER, [1], was_ready=True, limit_s=0.1)
    assert "GPU 1" not in str(caught.value)


def test_in_a_container_pids_of_the_host_are_taken_for_nobody_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    enter_container(monkeypatch)
    still = freed(CONTAINER[1], 100 * GIB, GpuProcess(os.getppid(), None))
    set_readings(monkeypatch, (still,))
    wait_for_memory(CONTAINER[1:], [os.getppid()], was_ready=True)  # the very number of one that we ended
    set_readings(monkeypatch, CONTAINER[1:])
    require_memory((CONTAINER[1].uuid,), 0.05)
    assert "pid 3917344 by NVML's count (of the host or of a container) with memory on GPU 1" in caplog.text


@pytest.mark.parametrize("was_ready", [True, False])
def test_in_a_container_a_server_that_may_have_held_nothing_has_nothing_to_give_back(
    was_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_container(monkeypatch)
    reading = emptied(*CONTAINER) if was_ready else CONTAINER
    set_readings(monkeypatch, reading)
    wait_for_memory(reading, [5], was_ready=was_ready)


def test_too_little_free_memory_is_busy_with_numbers_holders_and_ways_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "eagle3_pipeline")
    set_readings(monkeypatch, (IDLE, STRANGERS))
    words = (
        r"^GPU 2 \(NVIDIA H200, GPU-bc.*\) has 43\.8 GiB of 140\.4 GiB free, but gpu_memory_utilization 0\.9 "
        r"wants 126\.4 GiB; the rest is held by pid 3912210 \(python train.py\) with 0\.0 GiB, pid 3917730 "
        r".* with 96\.0 GiB\. Wait .*nvidia-smi.* another partition, or lower gpu_memory_utilization\.$"
    )
    with pytest.raises(Busy, match=words) as caught:
        require_memory((IDLE.uuid, STRANGERS.uuid), 0.9)
    assert caught.value.retryable
    told = [record.message.split(" (")[0] for record in caplog.records]
    assert told == [f"not of this pipeline and left alone: pid {pid}" for pid in (3912210, 3917730)]


def test_enough_free_memory_beside_strangers_is_enough_and_they_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "eagle3_pipeline")
    set_readings(monkeypatch, (STRANGERS,))
    require_memory((STRANGERS.uuid,), 0.3, ours=[3912210])
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        "not of this pipeline and left alone: pid 3917730"
    ]


def test_memory_that_comes_back_in_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = set_readings(monkeypatch, RUNNING, RUNNING, emptied(*RUNNING))
    require_memory(tuple(gpu.uuid for gpu in RUNNING), 0.9)
    assert len(replay.left) == 1


def test_on_the_cpu_and_without_nvml_there_is_nothing_to_ask() -> None:
    require_memory((), 0.9)
    require_memory(("0",), 0.9)
    wait_for_memory(read_memory(("0",)), [7], was_ready=True)
