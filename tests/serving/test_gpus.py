from pathlib import Path

import pytest

from eagle3_pipeline.errors import RecipeError
from eagle3_pipeline.serving import nvml
from eagle3_pipeline.serving.gpus import overlap, physical_gpus
from eagle3_pipeline.serving.lease import lease_names
from eagle3_pipeline.serving.specification import generation_server
from tests.serving.recorded_nvml import Readings, recorded
from tests.serving.test_specification import make_lineage

EIGHT = [gpu.uuid for gpu in recorded("eight-h200")]
SLICES = [gpu.uuid for gpu in recorded("split-h200") if gpu.parent]


def set_mask(monkeypatch: pytest.MonkeyPatch, mask: str | None) -> None:
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)


def set_machine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(nvml, "nvml", lambda: Readings(recorded(name)))


@pytest.mark.parametrize(
    ("mask", "names", "physical"),
    [
        (None, ("0", "1"), ("0", "1")),
        ("2,3", ("0", "1"), ("2", "3")),
        ("2, 3,", ("1",), ("3",)),
        ("GPU-aa,MIG-bb", ("1", "0"), ("MIG-bb", "GPU-aa")),
        ("2,3", ("GPU-5f", "MIG-7"), ("GPU-5f", "MIG-7")),
        ("", (), ()),
    ],
)
def test_without_nvml_gpus_count_within_the_outer_mask_and_uuids_stay_untouched(
    mask: str | None, names: tuple[str, ...], physical: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mask(monkeypatch, mask)
    assert physical_gpus(names) == physical


@pytest.mark.parametrize(
    ("mask", "names", "indices"),
    [
        (None, ("0", "1"), (0, 1)),
        (None, ("7", "0"), (7, 0)),
        ("2,3", ("0", "1"), (2, 3)),
        ("2, 3", ("1",), (3,)),
        ("GPU-d94e,GPU-5f3a91", ("1", "0"), (6, 4)),
        (f"{EIGHT[5]},1", ("0", "1"), (5, 1)),
        (None, (EIGHT[2],), (2,)),
        (None, ("GPU-bc", "GPU-5f3a0"), (2, 7)),
        ("2,3", (EIGHT[0], "0"), (0, 2)),
    ],
)
def test_whatever_a_gpu_is_called_its_physical_name_is_its_uuid(
    mask: str | None, names: tuple[str, ...], indices: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_machine(monkeypatch, "eight-h200")
    set_mask(monkeypatch, mask)
    assert physical_gpus(names) == tuple(EIGHT[index] for index in indices)


def test_an_index_in_one_recipe_and_a_uuid_in_another_are_one_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, "eight-h200")
    by_index, by_uuid = physical_gpus(("6",)), physical_gpus(("GPU-5f3a91",))
    assert lease_names(by_index) == lease_names(by_uuid) == [f"gpu-{EIGHT[6]}"]


def test_a_server_gets_the_uuids_of_its_gpus_as_its_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_machine(monkeypatch, "eight-h200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    server = {"generation": {"tensor_parallel": 2}}
    by_index = generation_server(make_lineage(tmp_path, partitions={"generation": "0-1"}, server=server))
    assert by_index.env["CUDA_VISIBLE_DEVICES"] == f"{EIGHT[2]},{EIGHT[3]}"
    uuids = {"generation": [EIGHT[2], EIGHT[3]]}
    by_uuid = generation_server(make_lineage(tmp_path, partitions=uuids, server=server))
    assert by_uuid.fingerprint == by_index.fingerprint


@pytest.mark.parametrize("mask", ["", "-1", " "])
def test_an_empty_mask_is_a_clear_error(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_mask(monkeypatch, mask)
    with pytest.raises(RecipeError, match=r"hides every GPU.*Unset it"):
        physical_gpus(("0",))


@pytest.mark.parametrize(("mask", "bad"), [("0,-1,1", "-1"), ("NoDevFiles", "NoDevFiles"), ("0,,1", "")])
def test_a_mask_that_ends_early_for_cuda_is_refused(
    mask: str, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mask(monkeypatch, mask)
    with pytest.raises(RecipeError, match=rf"'{mask}', and '{bad}' in it names no GPU.*correct or unset"):
        physical_gpus(("0",))


def test_an_index_beyond_the_mask_is_refused_with_the_valid_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    set_mask(monkeypatch, "4,5")
    with pytest.raises(RecipeError, match=r"GPU 2 .* shows 2 \(4,5\), so the recipe may use 0 to 1"):
        physical_gpus(("0", "2"))


@pytest.mark.parametrize(
    ("mask", "name", "words"),
    [
        (None, "8", rf"GPU 8 of the partition does not exist.*has 0 \({EIGHT[0]}\), .*7 \({EIGHT[7]}\)\."),
        ("9", "0", "GPU 9 of CUDA_VISIBLE_DEVICES does not exist"),
        (None, "GPU-77", "GPU GPU-77 of the partition does not exist"),
        (None, "MIG-77", "GPU MIG-77 of the partition does not exist"),
        (None, "GPU-5f3a", rf"is not one GPU: 6 \({EIGHT[6]}\), 7 \({EIGHT[7]}\) begin like that"),
    ],
)
def test_a_gpu_that_the_machine_does_not_have_is_refused_with_those_it_has(
    mask: str | None, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_machine(monkeypatch, "eight-h200")
    set_mask(monkeypatch, mask)
    with pytest.raises(RecipeError, match=words):
        physical_gpus((name,))


@pytest.mark.parametrize(
    ("machine", "mask", "names"),
    [
        ("eight-h200", None, ("6", EIGHT[6])),
        ("eight-h200", "3,3", ("0", "1")),
        ("eight-h200", "2,3", ("1", "GPU-a9")),
        (None, "2,2", ("0", "1")),
    ],
)
def test_two_names_of_one_gpu_in_one_partition_are_refused(
    machine: str | None, mask: str | None, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if machine is not None:
        set_machine(monkeypatch, machine)
    set_mask(monkeypatch, mask)
    with pytest.raises(RecipeError, match=rf"one GPU twice: {names[0]} and {names[1]} both are .*Name each"):
        physical_gpus(names)


def test_slices_are_gpus_of_their_own_also_behind_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, "split-h200")
    old = "MIG-GPU-8b0e7153-bf7c-3706-d85c-524e44006655/1/0"
    assert physical_gpus((SLICES[1], "1")) == (SLICES[1], EIGHT[1])
    set_mask(monkeypatch, f"{SLICES[0]},{old}")
    assert physical_gpus(("0", "1")) == (SLICES[0], old)


@pytest.mark.parametrize("name", ["0", EIGHT[0]])
def test_a_split_gpu_is_refused_with_its_slices_unless_only_one_is_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_machine(monkeypatch, "split-h200")
    with pytest.raises(RecipeError, match=f"GPU 0 .* is split .*of {SLICES[0]}, {SLICES[1]}"):
        physical_gpus((name,))
    few = tuple(gpu for gpu in recorded("split-h200") if gpu.uuid != SLICES[0])
    monkeypatch.setattr(nvml, "nvml", lambda: Readings(few))
    assert physical_gpus((name,)) == (SLICES[1],)


def test_partitions_overlap_where_they_share_a_gpu_or_the_cpu() -> None:
    assert overlap(("GPU-a", "GPU-b"), ("GPU-b",))
    assert not overlap(("GPU-a",), ("GPU-b",))
    assert not overlap(("GPU-a",), ())
    assert overlap((), ())
