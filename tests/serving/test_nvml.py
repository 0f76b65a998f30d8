import logging
import sys

import pytest

from eagle3_pipeline.errors import ServerRefused
from eagle3_pipeline.serving.nvml import GpuProcess, Nvml, nvml
from tests.serving.recorded_nvml import RecordedBindings, recorded

LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, VERSION_MISMATCH = 12, 9, 18
MIB = 2**20


def ask(monkeypatch: pytest.MonkeyPatch, bindings: RecordedBindings | None) -> Nvml | None:
    monkeypatch.setitem(sys.modules, "pynvml", bindings)  # None: not installed
    return nvml()


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_reading_has_each_gpu_with_its_memory_and_who_holds_it(
    as_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bindings = RecordedBindings("eight-h200", as_bytes=as_bytes)
    driver = ask(monkeypatch, bindings)
    assert driver is not None
    gpus = driver.gpus()
    assert [gpu.index for gpu in gpus] == list(range(8))
    assert {(gpu.name, gpu.total_bytes, gpu.parent) for gpu in gpus} == {("NVIDIA H200", 143_771 * MIB, None)}
    assert gpus[0].uuid == "GPU-8b0e7153-bf7c-3706-d85c-524e44006655"
    assert gpus[0].processes == (GpuProcess(3941201, 128_904 * MIB),)
    assert gpus[0].used_bytes == (128_904 + 614) * MIB
    assert gpus[2].processes == (GpuProcess(3912210, 40 * MIB), GpuProcess(3917730, 98_304 * MIB))
    assert gpus[3].processes == ()
    assert driver.driver() == "580.105.08"
    assert str(gpus[0]) == "GPU 0 (NVIDIA H200, GPU-8b0e7153-bf7c-3706-d85c-524e44006655)"


def test_nvml_is_closed_after_each_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = RecordedBindings("eight-h200")
    driver = ask(monkeypatch, bindings)
    assert bindings.open == 0
    assert driver is not None
    driver.gpus()
    assert bindings.open == 0


def test_the_slices_of_a_split_gpu_follow_it_and_what_is_not_told_is_none() -> None:
    gpus = recorded("split-h200")
    assert [(gpu.index, gpu.uuid[:12], gpu.parent and gpu.parent[:12]) for gpu in gpus] == [
        (0, "GPU-8b0e7153", None),
        (0, "MIG-7c41aa09", "GPU-8b0e7153"),
        (0, "MIG-c02f5d18", "GPU-8b0e7153"),
        (1, "GPU-9a6656c9", None),
    ]
    assert gpus[1].processes == (GpuProcess(3941201, None),)
    assert gpus[1].total_bytes == 71_424 * MIB
    assert str(gpus[1]).startswith("a slice of GPU 0 (NVIDIA H200 MIG 3g.71gb, MIG-7c41aa09")


def test_a_gpu_without_memory_of_its_own_is_read_all_the_same() -> None:
    (gpu,) = recorded("shared-memory")
    assert (gpu.total_bytes, gpu.free_bytes) == (0, 0)
    assert gpu.processes == (GpuProcess(3915120, 2048 * MIB),)


def test_a_broken_gpu_is_left_out_in_words_and_the_others_keep_their_index(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "eagle3_pipeline")
    assert [gpu.index for gpu in recorded("one-lost")] == [0, 2]
    assert 'GPU 1 is left out, for NVML answers "GPU is lost"' in caplog.text


@pytest.mark.parametrize("code", [LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED])
def test_without_driver_or_bindings_there_is_no_nvml(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = RecordedBindings("eight-h200")
    bindings.at_init = code
    assert ask(monkeypatch, bindings) is None
    assert ask(monkeypatch, None) is None


def test_a_driver_that_cannot_be_asked_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    words = r"cannot be asked: NVML answers \"RM has detected an NVML/RM version mismatch.*restarted"
    bindings = RecordedBindings("eight-h200")
    driver = ask(monkeypatch, bindings)
    assert driver is not None
    bindings.at_init = VERSION_MISMATCH
    for call in (nvml, driver.gpus, driver.driver):
        with pytest.raises(ServerRefused, match=words):
            call()
