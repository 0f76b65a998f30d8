import sys
from types import SimpleNamespace

import pytest

from eagle3_pipeline.errors import RecipeError
from eagle3_pipeline.serving.gpus import physical_gpus, wait_for_memory


@pytest.mark.parametrize(
    ("mask", "names", "physical"),
    [
        (None, ("0", "1"), ("0", "1")),
        ("2,3", ("0", "1"), ("2", "3")),
        ("2, 3", ("1",), ("3",)),
        ("GPU-aa,MIG-bb", ("1", "0"), ("MIG-bb", "GPU-aa")),
        ("2,3", ("GPU-5f", "MIG-7"), ("GPU-5f", "MIG-7")),
        ("", (), ()),
    ],
)
def test_gpus_count_within_the_outer_mask_and_uuids_stay_untouched(
    mask: str | None, names: tuple[str, ...], physical: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert physical_gpus(names) == physical


@pytest.mark.parametrize("mask", ["", "-1", " "])
def test_an_empty_mask_is_a_clear_error(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    with pytest.raises(RecipeError, match=r"hides every GPU.*Unset it"):
        physical_gpus(("0",))


def test_an_index_beyond_the_mask_is_refused_with_the_valid_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(RecipeError, match=r"GPU 2 .* shows 2 \(4,5\), so the recipe may use 0 to 1"):
        physical_gpus(("0", "2"))


def test_memory_counts_as_back_when_the_driver_lists_the_ended_processes_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [[7, 99], [7], [99], []]
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [
            SimpleNamespace(pid=pid) for pid in answers.pop(0)
        ],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    wait_for_memory(("0",), [7])
    assert answers == [[]]
